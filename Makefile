# Set-up, demo and checks. Every target can be run again; what is up to date is not done twice.
SUPPORTED := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))
# python3 if it is one of those, else the newest that there is; else python3, and the preflight says what is wrong.
PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done),python3)
PIP_ARGS ?=
THREADS ?=
JOBS ?= 2
PORTS ?=
VENV := .venv
BIN := $(VENV)/bin
MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
ENGINE := .cache/engines/smollm2-pariskv
QUESTION ?= How many passengers did the Lady Trelawny land?
SERVER_THREADS := $(if $(THREADS),--threads $(THREADS))

.PHONY: demo serve test test-slow test-gpu soak fuzz check check-install lint types links format install model engine clean

demo: engine ## build, serve, ask a question about a long document, shut down
	$(BIN)/python -m kvseek.cli.demo --engine_dir $(ENGINE) --document examples/harbour_log.txt \
	    --question "$(QUESTION)" $(SERVER_THREADS)

serve: engine ## leave the server running in the foreground (Ctrl-C ends it)
	$(BIN)/kvseek serve --engine_dir $(ENGINE) $(PORTS) $(SERVER_THREADS)

test: install model ## the tests but for the slow ones, in two processes; those that need a GPU are skipped without one
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile

test-slow: install model ## soak, fuzz, load and faults of real servers, real models: what make test leaves out
	$(BIN)/python -m pytest -m slow -n $(JOBS) --dist loadfile

test-gpu: install ## tests/gpu and every other test that is marked gpu; fails without a GPU
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "PyTorch sees no CUDA device")'
	$(BIN)/python -m pytest -m gpu

soak: install ## 1,000 requests of 32 clients against a real server, one of whose processes is killed; some two minutes
	$(BIN)/python -m tests.server.soak.main --requests 1000 --clients 32

fuzz: install ## ten minutes of mutated inputs at each door of a real server; inputs that lead to a fault go to build/fuzz
	@mkdir -p build/fuzz
	@for door in grpc http raw engine-socket; do \
	    $(BIN)/python -m tests.server.fuzz.main --door $$door --seconds 600 --folder build/fuzz || exit 1; done

check: lint types test test-slow ## what .ci/run calls

check-install: install ## the Dockerfile's installation of target cpu without Docker, in a temporary folder; minutes, 3 GB
	$(BIN)/python docker/check_install.py

lint: install links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint Dockerfile
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

links: # mypy and import-linter look for kvseek.core in the folder kvseek, not through an editable install
	@find kvseek -maxdepth 1 -type l -delete
	@for file in [a-z]*/__init__.py; do folder=$${file%/*}; \
	    case $$folder in kvseek | tests) ;; *) ln -s ../$$folder kvseek/$$folder ;; esac; done

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
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e ".[dev,cuda,otel]"
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt --no-deps nvidia-pytriton
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt tensorrt-rtx-cu13
	touch $@

model: $(MODEL)

$(MODEL): | install
	$(BIN)/python examples/fetch_model.py $@

engine: install model ## an engine directory of the example model, rebuilt when anything that it is made of changes
	$(BIN)/python builder/build.py --model $(MODEL) --method pariskv --output_dir $(ENGINE) --max_batch_size 4

clean: ## forget the virtual environment, the model and the engines
	rm -rf $(VENV) .cache build *.egg-info
