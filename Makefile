# Set-up, demo and checks. Every target can be run again; what is up to date is not done twice.
SUPPORTED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))
# python3 if it is one of those, else the newest that there is; else python3, and the preflight says what is wrong.
PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done),python3)
PIP_ARGS ?=
THREADS ?=
# Processes of tests: one more than cores, as tests of servers wait much of their time; at most 6, which need some 2 GB each.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 6 ? cores + 1 : 6)))
PORTS ?=
VENV := .venv
BIN := $(VENV)/bin
# A file of tests is one process's, and tests/conftest.py says which comes first.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
ENGINE := .cache/engines/smollm2-nested
QUESTION ?= How many passengers did the bank holiday steamer land?
SECOND_QUESTION ?= How many persons were employed about the harbour?
SERVER_THREADS := $(if $(THREADS),--threads $(THREADS))
LOAD := .cache/load
PERF_ANALYZER := $(LOAD)/perf_analyzer/bin/perf_analyzer
AIPERF := $(LOAD)/aiperf/bin/aiperf
LM_EVAL_VERSION := 0.4.13
LM_EVAL := $(LOAD)/lm_eval/bin/lm_eval
LM_EVAL_MODELS := .cache/lm_eval/lm_eval/__init__.py
BRIDGES := .cache/bridges/bin/python
AGENTS := .cache/agents/bin/litellm
HUB := git+https://github.com/xAlg-ai/sparse-attention-hub@1a048c9314b6b2cb7e8a7553f744c478b8abfef0
LOAD_ENGINE := .cache/engines/smollm2-load
LOAD_RESULT ?= build/load.json
PERF_ARGS ?=

COMMIT ?= main
# Hundreds of processes of the tests import kvseek, and would compile it each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-slow test-gpu soak fuzz perf perf-gate perf-results tables load-tools lm-eval test-bridges test-agents check check-install lint sizes types links format install model engine clean

demo: engine ## build, serve, ask two questions about a long document, shut down
	$(BIN)/python -m kvseek.cli.demo --engine_dir $(ENGINE) --document examples/harbour_log.txt \
	    --question "$(QUESTION)" --question "$(SECOND_QUESTION)" $(SERVER_THREADS)

serve: engine ## leave the server running in the foreground (Ctrl-C ends it)
	$(BIN)/kvseek serve --engine_dir $(ENGINE) $(PORTS) $(SERVER_THREADS)

test: install model $(LM_EVAL_MODELS) ## the tests but for the slow ones; those that need a GPU are skipped without one
	$(PYTEST) -m "not slow"

test-slow: install model $(PERF_ANALYZER) ## soak, fuzz, load and faults of real servers, real models, whole benchmarks: what make test leaves out
	$(PYTEST) -m slow

test-gpu: install ## tests/gpu and every other test that is marked gpu; fails without a GPU
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "PyTorch sees no CUDA device")'
	$(BIN)/python -m pytest -m gpu

soak: install ## 1,000 requests of 32 clients against a real server, one of whose processes is killed; some two minutes
	$(BIN)/python -m tests.server.soak.main --requests 1000 --clients 32

fuzz: engine ## 5,000 checkpoints beside transformers; ten minutes of guides and of inputs at each door; faults go to build/fuzz
	$(BIN)/python -m tests.builder.fuzz_checkpoints --cases 5000
	@mkdir -p build/fuzz
	@for door in grpc http openai raw engine-socket; do \
	    $(BIN)/python -m tests.server.fuzz.main --door $$door --seconds 600 --folder build/fuzz || exit 1; done
	$(BIN)/python -m tests.server.fuzz.guides --tokenizer $(ENGINE) --folder build/fuzz

perf: load-tools model ## load test with perf_analyzer and aiperf: table, $(LOAD_RESULT) and an SVG beside it; some twelve minutes
	@mkdir -p $(dir $(LOAD_RESULT))
	$(BIN)/python builder/build.py --model $(MODEL) --method pariskv --output_dir $(LOAD_ENGINE) \
	    --max_batch_size 8 --max_seq_len 4096 --cache.reuse false --no-check
	$(BIN)/python -m kvseek.bench.load.main --engine_dir $(LOAD_ENGINE) --output $(LOAD_RESULT) $(PERF_ARGS)
	$(BIN)/python -m kvseek.bench.charts.load $(LOAD_RESULT) --output $(LOAD_RESULT:.json=.svg)

perf-results: ## make perf, and put its figures where docs/load_testing.md shows them; on a quiet machine
	$(MAKE) perf LOAD_RESULT=bench/results/load-cpu-smollm2.json
	rm bench/results/load-cpu-smollm2.svg
	$(MAKE) tables

perf-gate: install ## is this tree slower than COMMIT by more than 2 %? full, nested and pariskv in turns, on a GPU; some ten minutes
	$(BIN)/python -m kvseek.bench.perf_gate --commit $(COMMIT)

tables: install ## write the tables and pictures of measured figures into the documents, from bench/results
	$(BIN)/python -m kvseek.bench.documents

load-tools: $(PERF_ANALYZER) $(AIPERF) ## the two load testers, each in a folder of its own: their pins are not kvseek's; 1.3 GB

# tritonclient 2.51 has the program, and the version that kvseek uses has not; two of the libraries that it needs are in nvidia-pytriton's wheel.
$(PERF_ANALYZER): | install
	@mkdir -p $(LOAD)/perf_analyzer/lib
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    cp $$site/nvidia_pytriton.libs/libb64-*.so.0d $(LOAD)/perf_analyzer/lib/libb64.so.0d && \
	    cp $$site/nvidia_pytriton.libs/libcudart-*.so.12.* $(LOAD)/perf_analyzer/lib/libcudart.so.12
	$(BIN)/pip install -q $(PIP_ARGS) --no-deps --upgrade --target $(LOAD)/perf_analyzer tritonclient==2.51.0

$(AIPERF): | install
	$(PYTHON) -m venv $(LOAD)/aiperf
	$(LOAD)/aiperf/bin/pip install -q $(PIP_ARGS) aiperf==0.13.0

lm-eval: $(LM_EVAL) ## lm-evaluation-harness in a folder of its own, which sees kvseek and what it needs; 570 MB

$(LM_EVAL): | install
	$(PYTHON) -m venv $(LOAD)/lm_eval
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($(LOAD)/lm_eval/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvseek.pth
	$(LOAD)/lm_eval/bin/pip install -q $(PIP_ARGS) 'lm_eval[api]==$(LM_EVAL_VERSION)' 'pyarrow<21'

$(LM_EVAL_MODELS): | install  # what models need of it: 9 MB to fetch, 4 to keep; tasks need pyarrow
	$(BIN)/pip install -q $(PIP_ARGS) --no-deps --target .cache/lm_eval lm_eval==$(LM_EVAL_VERSION)
	rm -r .cache/lm_eval/lm_eval/tasks

test-bridges: $(BRIDGES) ## bench/bridges in kvpress and sparse-attention-hub, and their choices beside those of plugins/peers; 1 GB
	$(BRIDGES) -m pytest -p no:cacheprovider tests/bench/bridges tests/plugins/peers/test_theirs.py

$(BRIDGES): | install
	$(PYTHON) -m venv .cache/bridges
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $$($(BRIDGES) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvseek.pth
	$(BRIDGES) -m pip install -q $(PIP_ARGS) kvpress==0.5.5 'ray[tune]' seaborn
	$(BRIDGES) -m pip install -q $(PIP_ARGS) --no-deps $(HUB)

test-agents: install $(AGENTS) ## programs of others that call tools, unchanged, ask a server; 460 MB
	$(BIN)/python -m pytest tests/server/openai/test_agents.py

$(AGENTS): | install
	$(PYTHON) -m venv .cache/agents
	.cache/agents/bin/pip install -q $(PIP_ARGS) litellm==1.110.2 langchain-openai==1.7.4 'pydantic-ai-slim[openai]==2.68.0' \
	    anthropic==2.14.0

# mypy has one thread, so it runs beside the tests; lint has made the links that it needs.
check: lint model $(PERF_ANALYZER) $(LM_EVAL_MODELS) ## lint, types and all tests: what .ci/run calls
	$(BIN)/mypy -p kvseek & types=$$!; $(PYTEST); tests=$$?; wait $$types && exit $$tests

check-install: install ## the Dockerfile's installation of target cpu without Docker, in a temporary folder; minutes, 3 GB
	$(BIN)/python docker/check_install.py

lint: install links sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint Dockerfile
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

links: # mypy and import-linter look for kvseek.core in the folder kvseek, not through an editable install
	@find kvseek -maxdepth 1 -type l -delete
	@for file in [a-z]*/__init__.py; do folder=$${file%/*}; \
	    case $$folder in kvseek | tests) ;; *) ln -s ../$$folder kvseek/$$folder ;; esac; done

sizes: # models and raw results do not belong into the history, where they stay for ever
	@large=$$(git ls-files -z | xargs -0 -r sh -c 'find "$$@" -type f -size +500k' sh); \
	    test -z "$$large" || { echo "larger than 500 KiB, so not for git: $$large"; exit 1; }

types: install links
	$(BIN)/mypy -p kvseek

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) examples/preflight.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt setuptools torch
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e ".[dev,cuda,guided,otel,replicas]"
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt --no-deps nvidia-pytriton
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt tensorrt-rtx-cu13
	touch $@

model: $(MODEL)

$(MODEL): | install
	$(BIN)/python examples/fetch_model.py $@

# --no-check: transformers takes a minute to read this file, and the slow tests compare the model's logits.
engine: install model ## an engine directory of the example model, rebuilt when anything that it is made of changes
	$(BIN)/python builder/build.py --model $(MODEL) --method nested --dtype bfloat16 \
	    --output_dir $(ENGINE) --max_batch_size 4 --no-check

clean: ## forget the virtual environment, the model and the engines
	rm -rf $(VENV) .cache build *.egg-info
