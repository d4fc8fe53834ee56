"""A tokenizer of the kind of Llama 2's and Mistral 7B's: byte-pair encoding of text whose spaces are marked, bytes as <0x0A>."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

SPACE = "\u2581"
SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # ids 3 to 258
CORPUS = "France is Paris. The capital of France is Paris, the lamp was lit at dusk; one ship, two ships (Paris), 1931."


def sentencepiece_backend(size: int = 384) -> Tokenizer:
    """Make the tokenizer as Llama 2's tokenizer.json states it: every text begins with a space, which decoding leaves out."""
    learnt = Tokenizer(models.BPE())
    learnt.train_from_iterator(
        [SPACE + word for word in CORPUS.split()] * 3,
        trainers.BpeTrainer(vocab_size=size - 259, show_progress=False),
    )
    pieces = sorted(learnt.get_vocab(), key=learnt.get_vocab().get)  # type: ignore[arg-type]
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *BYTES, *pieces])}
    model = models.BPE(vocabulary, _merges(learnt), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return backend


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def save_sentencepiece(directory: Path, chat_template: str | None = None) -> None:
    """Save the tokenizer as transformers writes it, beside a checkpoint or as the tokenizer of an engine."""
    from transformers import PreTrainedTokenizerFast

    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_backend(), **names)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
