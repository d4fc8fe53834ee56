// Asks one or two OpenAI ports about a document, and shades the passages that each token's step has read.
// What is text of a document, a model or a server is never put into the page as HTML, only as text.

const ALL = "all";
const MOST_READ = 5;

/** The text of the prompt, and of the answer behind it, by positions of tokens. */
export class Context {
  /** `offsets` counts Unicode characters before each token, which a JavaScript string has one or two units of. */
  constructor({ text, offsets }) {
    this.characters = Array.from(text);
    this.offsets = [...offsets];
    this.promptTokens = offsets.length;
  }

  /** Adds a token of the answer. */
  add(text) {
    this.offsets.push(this.characters.length);
    this.characters.push(...text);
  }

  get tokens() {
    return this.offsets.length;
  }

  /** The text of the tokens `first` to `end` - 1. */
  slice(first, end) {
    const at = (token) => (token < this.tokens ? this.offsets[token] : this.characters.length);
    return this.characters.slice(at(first), at(end)).join("");
  }
}

/**
 * The share, 0 to 1, of each passage's selectable rows that a step read, as a mean over layers and KV heads.
 *
 * `rows` is an entry of `selected_rows`; `layer` and `head` are numbers, or "all". Layers that read every row select nothing: they
 * count only where they are all that is asked for, and are told as `dense`.
 */
export function shares(rows, layer, head, passages) {
  const sums = new Float64Array(passages);
  const [start, stop] = rows.region;
  let lists = 0;
  rows.blocks.forEach((heads, i) => {
    if (heads === null || (layer !== ALL && rows.layers[i] !== layer)) return;
    heads.forEach((blocks, j) => {
      if (head !== ALL && rows.kv_heads[j] !== head) return;
      lists += 1;
      blocks.forEach((block, k) => { sums[block] += rows.counts[i][j][k]; });
    });
  });
  for (let b = 0; b < passages; b += 1) {
    const size = Math.min(stop, (b + 1) * rows.block) - Math.max(start, b * rows.block);
    if (size <= 0) sums[b] = 0;
    else sums[b] = lists ? sums[b] / (lists * size) : 1;
  }
  return { sums, dense: lists === 0 };
}

/** The mean of what several steps read, each as `shares` gives it. */
export function mean(all, passages) {
  const sums = new Float64Array(passages);
  for (const each of all) each.sums.forEach((share, b) => { sums[b] += share / all.length; });
  return { sums, dense: all.every((each) => each.dense) };
}

/** Yields the JSON of a stream's events; throws an Error if the stream has one, or ends without "[DONE]". */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The server broke off its answer.");
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n").trim();
      if (!data) continue; // a comment
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** The root of a port, with or without the /v1 that OpenAI's clients need. */
export function rootOf(url) {
  return url.trim().replace(/\/+(v1\/*)?$/, "");
}

const count = (number) => number.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const shortened = (text) => {
  const plain = text.replace(/\s+/g, " ").trim();
  return plain.length > 90 ? `${plain.slice(0, 90)}…` : plain;
};
const byId = (id) => document.getElementById(id);

function element(name, text, properties = {}) {
  return Object.assign(document.createElement(name), { textContent: text }, properties);
}

/** One server: what it is asked, and its answer. */
class Pane {
  constructor(root, keyBox) {
    this.root = root;
    this.keyBox = keyBox;
    this.section = byId("pane").content.firstElementChild.cloneNode(true);
    byId("panes").append(this.section);
    this.find("h2").textContent = root || "This server";
    this.find(".token").addEventListener("input", () => this.choose(Number(this.find(".token").value)));
    for (const name of [".layer", ".head"]) this.find(name).addEventListener("change", () => this.draw());
    this.find(".answer").addEventListener("click", ({ target }) => {
      const place = [...this.find(".answer").children].indexOf(target);
      if (place >= 0) this.choose(place + 1);
    });
  }

  find(selector) {
    return this.section.querySelector(selector);
  }

  say(text, isError = false) {
    this.find(".status").textContent = text;
    this.find(".status").classList.toggle("error", isError);
  }

  async fetch(path, options = {}) {
    const key = this.keyBox.querySelector("input").value;
    const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(options.body && { "Content-Type": "application/json" }) };
    let response;
    try {
      response = await fetch(this.root + path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const remedy = this.root ? `, or does not let this page ask: start it with --cors_origins ${location.origin}` : "";
      throw new Error(`The server cannot be reached${remedy}.`);
    }
    if (response.ok) return response;
    const message = await response.json().then((own) => own.error.message, () => response.statusText);
    if (response.status === 401) {
      this.keyBox.hidden = false;
      this.keyBox.querySelector("input").focus();
      throw new Error(`This server wants an API key: enter it above. (${message})`);
    }
    throw new Error(`${response.status}: ${message}`);
  }

  async model(signal) {
    const { data } = await (await this.fetch("/v1/models", { signal })).json();
    this.find("h2").textContent = `${data[0].id} at ${new URL(this.root || location.origin).host}`;
    return data[0].id;
  }

  /** Asks, and shows the answer while it arrives. */
  async ask(content, maxTokens, signal) {
    Object.assign(this, { context: null, steps: [], chosen: 0, follows: true, unreported: false, decoder: new TextDecoder() });
    this.find(".result").hidden = true;
    this.find(".answer").replaceChildren();
    this.find(".told").removeAttribute("aria-live"); // it changes with every token
    this.say("Asking…");
    try {
      const body = {
        model: await this.model(signal),
        messages: [{ role: "user", content }],
        max_tokens: maxTokens,
        temperature: 0,
        stream: true,
        stream_options: { include_usage: true },
        logprobs: true, // for the text of each token
        return_selected_rows: true,
      };
      this.say("Reading…");
      const begun = performance.now();
      const response = await this.fetch("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
      for await (const event of events(response.body)) this.take(event, performance.now() - begun);
      if (this.unreported) throw new Error("This server does not say which rows it reads; a port of kvseek does.");
      this.say(`Answered with ${count(this.steps.length)} tokens.`);
      this.find(".status").append(element("span", this.find(".answer").textContent, { className: "unseen" })); // to be read out
    } catch (error) {
      if (error.name === "AbortError") this.say(`Stopped after ${count(this.steps.length)} tokens.`);
      else this.say(error.message, true);
    }
    this.find(".told").setAttribute("aria-live", "polite");
  }

  take(event, milliseconds) {
    if (event.usage) {
      const before = event.usage.prompt_tokens_details.cached_tokens;
      this.find(".prompt").textContent = `${count(event.usage.prompt_tokens)}, ${count(before)}`;
    }
    const choice = event.choices[0];
    if (!choice?.selected_rows) {
      this.unreported ||= !this.steps.length && Boolean(choice?.delta?.content);
      return;
    }
    if (choice.prompt) this.begin(new Context(choice.prompt), milliseconds);
    choice.selected_rows.forEach((rows, i) => {
      const { bytes } = choice.logprobs.content[i];
      const text = this.decoder.decode(new Uint8Array(bytes), { stream: true });
      this.steps.push({ text, rows });
      this.context.add(text);
      this.find(".answer").append(element("span", text));
    });
    const { length } = this.steps;
    if (length > 1) this.find(".tpot").textContent = `${((milliseconds - this.first) / (length - 1)).toFixed(1)} ms`;
    this.find(".token").max = length;
    if (this.follows) this.chosen = length;
    this.drawSoon();
  }

  begin(context, milliseconds) {
    Object.assign(this, { context, first: milliseconds, block: 0 });
    this.find(".ttft").textContent = `${count(Math.round(milliseconds))} ms`;
    this.find(".tpot").textContent = "–";
    this.find(".context").replaceChildren();
    this.find(".layer").replaceChildren();
    this.find(".result").hidden = false;
    this.say("Answering…");
  }

  /** Shows what one token's step has read: the first is 1, and 0 stands for all. */
  choose(token) {
    this.follows = false;
    this.chosen = token;
    this.draw();
  }

  drawSoon() {
    if (!this.waiting) requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    this.waiting = true;
  }

  draw() {
    const { steps, chosen } = this;
    if (!this.context) return;
    const known = steps.find((step) => step.rows)?.rows;
    if (known && !this.find(".layer").length) this.offer(known);
    const slider = this.find(".token");
    slider.value = chosen;
    const name = chosen ? `Token ${chosen} of ${steps.length}, “${steps[chosen - 1].text}”` : `All ${steps.length} tokens`;
    slider.setAttribute("aria-valuetext", name);
    [...this.find(".answer").children].forEach((span, i) => span.classList.toggle("chosen", i === chosen - 1));
    const shown = (chosen ? [steps[chosen - 1]] : steps).map((step) => step.rows).filter(Boolean);
    const latest = shown.at(-1);
    const sum = (field) => shown.reduce((total, rows) => total + rows[field], 0);
    const attended = sum("attended_tokens") / shown.length;
    const cached = sum("cached_tokens") / shown.length;
    this.find(".attended").textContent = latest
      ? `${count(Math.round(attended))} / ${count(Math.round(cached))} (${percent(attended / cached)})`
      : "–";
    this.layOut(known?.block ?? this.context.tokens);
    const spans = [...this.find(".context").children];
    const [layer, head] = [".layer", ".head"].map((one) => (this.find(one).value === ALL ? ALL : Number(this.find(one).value)));
    const read = mean(shown.map((rows) => shares(rows, layer, head, spans.length)), spans.length);
    const most = Math.max(...read.sums, 0) || 1;
    spans.forEach((span, b) => {
      span.style.setProperty("--share", read.sums[b] / most);
      span.dataset.share = read.sums[b].toFixed(4);
      const outside = latest && ((b + 1) * latest.block <= latest.region[0] || b * latest.block >= latest.region[1]);
      span.classList.toggle("window", Boolean(outside));
      span.title = outside ? "every step reads this passage" : `${percent(read.sums[b])} of the rows were read`;
    });
    this.tell(name, latest && read, spans);
  }

  offer({ layers, kv_heads: heads }) {
    for (const [selector, numbers] of [[".layer", layers], [".head", heads]]) {
      const options = numbers.map((number) => element("option", number, { value: number }));
      this.find(selector).replaceChildren(element("option", "all", { value: ALL }), ...options);
    }
  }

  /** Makes a span of each passage, anew where their size has changed; tokens of the answer go on with the last one. */
  layOut(block) {
    const { context } = this;
    const box = this.find(".context");
    if (block !== this.block) box.replaceChildren();
    this.block = block;
    for (let b = Math.max(0, box.childElementCount - 1); b * block < context.tokens; b += 1) {
      const text = context.slice(b * block, (b + 1) * block);
      if (b === box.childElementCount) box.append(element("span", text));
      else if (box.children[b].textContent !== text) box.children[b].textContent = text;
    }
  }

  tell(name, read, spans) {
    const order = [...(read?.sums ?? [])].map((share, b) => [share, b]).filter(([share]) => share > 0);
    order.sort(([one, first], [other, second]) => other - one || first - second);
    let what = `${count(order.length)} passages of ${this.block} tokens were read; most:`;
    if (!read) what = "reading the prompt gave it";
    else if (read.dense) what = "every row was read";
    this.find(".told").textContent = `${name}: ${what}`;
    const entries = read?.dense ? [] : order.slice(0, MOST_READ);
    this.find(".most").replaceChildren(...entries.map(([share, b]) => {
      const item = document.createElement("li");
      const button = element("button", `${percent(share)}: ${shortened(spans[b].textContent)}`, { type: "button" });
      button.addEventListener("click", () => {
        spans.forEach((span) => span.classList.toggle("found", span === spans[b]));
        spans[b].scrollIntoView({ block: "nearest" });
      });
      item.append(button);
      return item;
    }));
  }
}

function start() {
  const area = byId("document");
  const load = async (file) => { if (file) area.value = await file.text(); };
  byId("file").addEventListener("change", () => load(byId("file").files[0]));
  area.addEventListener("dragover", (event) => {
    event.preventDefault();
    area.classList.add("over");
  });
  for (const name of ["dragleave", "drop"]) area.addEventListener(name, () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return; // text is the browser's
    event.preventDefault();
    load(event.dataTransfer.files[0]);
  });

  const own = new Pane("", byId("own-key"));
  own.model().then(() => own.say("Ready."), (error) => own.say(error.message, true));
  let other = null;
  let controller = null;
  byId("stop").addEventListener("click", () => controller?.abort());
  byId("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (controller) return;
    const root = rootOf(byId("other").value);
    if (root !== (other?.root ?? "")) {
      other?.section.remove();
      byId("other-key").hidden = true; // a key is for the server that it was entered for
      byId("other-key").querySelector("input").value = "";
      other = root ? new Pane(root, byId("other-key")) : null;
    }
    const text = [area.value.trim(), byId("question").value].filter(Boolean).join("\n\n");
    controller = new AbortController();
    byId("send").disabled = true;
    byId("stop").disabled = false;
    const panes = other ? [own, other] : [own];
    await Promise.all(panes.map((pane) => pane.ask(text, Number(byId("tokens").value), controller.signal)));
    controller = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  });
}

if (globalThis.document) start();
