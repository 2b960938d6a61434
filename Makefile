# One word each. `make serve` or `make test` alone, on a machine with Python 3.11, is enough.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PINNED := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c infra/constraints.txt
QUICK := not slow and not gpu and not nightly
DURATIONS := --durations=30 --durations-min=2
SOURCES := eesd_launcher.py eesd_dist serve_app cluster tests infra

.PHONY: install install-serving pins model serve test test-services fuzz-reduce test-fuzz test-hosts test-autoscaling test-nightly test-endurance test-plan test-planted-errors test-slow check format gpu-check plots references bench bench-chaos bench-chaos-hosts bench-control bench-hosts bench-online

# Everything, for developers.
install: $(VENV)/.installed

# What a host needs that serves: no tools, nothing for training.
install-serving: $(VENV)/.serving

# The stamps make the second time quick; a changed dependency makes it install again.
$(VENV)/.serving: pyproject.toml infra/constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("found Python " + sys.version.split()[0] + ", need 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time downloads torch and Ray: some minutes)"
	@$(PINNED) -e '.[batch]'
	@touch $@

$(VENV)/.installed: $(VENV)/.serving
	@$(PINNED) -e '.[dev]'
	@touch $@

# After a change of infra/constraints.txt: what the pinned packages require.
pins: install
	$(BIN)/python infra/record_pins.py

# SmolLM2-135M-Instruct, into the cache folder (EESD_CACHE_DIR).
model: install-serving
	@$(BIN)/python infra/fetch_model.py

# SmolLM2-135M-Instruct, or MODEL: a folder, a GGUF file, or `bundled`, the small model, which also serves without network.
serve: install-serving
	@model='$(MODEL)'; \
	case "$$model" in ''|smollm2) \
	    $(BIN)/python infra/fetch_model.py > /dev/null; \
	    case $$?$$model in 0*) model=smollm2 ;; 1) model=bundled ;; *) exit 1 ;; esac ;; \
	esac; \
	echo eesd serve --model "$$model"; \
	exec $(BIN)/eesd serve --model "$$model"

# Arithmetic without bounds on time: it runs in addition to the services, and takes what these leave of two cores. At this
# priority a test of 40 s has taken more than the usual 300: only one that hangs takes 20 minutes.
PATIENT := $(addprefix tests/unit/,backends control distill engine llm model routing sampling schedule text)
OTHERS := $(addprefix --ignore=,$(PATIENT))

# Services one after the other: two at once, and Ray may take too long to start. Each run uses the kernels of those before.
test: export EESD_CACHE_DIR := $(CURDIR)/build/test-cache
test: install
	rm -rf $(EESD_CACHE_DIR)
	mkdir -p build
	$(BIN)/python -m pytest -m '$(QUICK)' --numprocesses 2 --dist loadfile $(DURATIONS) $(OTHERS) tests/unit tests/dist
	nice -n 19 $(BIN)/python -m pytest --timeout 1200 -m '$(QUICK) and not alone' --numprocesses 2 --dist loadfile $(DURATIONS) $(PATIENT) > build/patient.log 2>&1 & \
	    patient=$$!; \
	    $(BIN)/python -m pytest -m '$(QUICK) and not alone' $(DURATIONS) tests/serve tests/hosts; services=$$?; \
	    wait $$patient; patient=$$?; cat build/patient.log; \
	    [ $$services -eq 0 ] && [ $$patient -eq 0 ]
	$(BIN)/python -m pytest -m '$(QUICK) and alone' $(DURATIONS) $(PATIENT) tests/serve tests/hosts

# Services in two processes, then what needs both cores: for machines with more of them.
test-services: install
	$(BIN)/python -m pytest -m '$(QUICK) and not alone' --numprocesses 2 --dist loadfile --no-loadscope-reorder $(DURATIONS) tests/serve tests/hosts
	$(BIN)/python -m pytest -m '$(QUICK) and alone' $(DURATIONS) tests/serve tests/hosts

# Needs Linux, root, iproute2, openssh-server and rsync; skipped with a reason elsewhere.
test-hosts: install
	$(BIN)/python -m pytest -m hosts tests/hosts

# 20,000 random requests to a service of its own, and Schemathesis, which is downloaded; half an hour.
test-fuzz: install
	$(BIN)/python -m pytest tests/serve/test_schemathesis.py tests/serve/shared/test_fuzz.py -k 'twenty_thousand or document'

# A load from zero to eight streams and back, and the pipelines and nodes that follow; five minutes.
test-autoscaling: install
	$(BIN)/python -m pytest -m autoscaling tests/serve

# Faults of every kind under a load, and pipelines that come and go; twenty minutes.
test-nightly: install
	$(BIN)/python -m pytest -m 'nightly and not slow' $(DURATIONS) tests/unit tests/dist tests/serve tests/hosts

# The slopes of memory, handles, pages and actors over twenty minutes of load, kills and left streams.
test-endurance: install
	$(BIN)/python -m pytest -s -m endurance tests/serve

# The planner's forecast against measured rounds of this machine, which has to be quiet; ten minutes.
test-plan: install
	$(BIN)/python -m tests.support.plan_accuracy

# Errors planted in the verify stage, each of which the fuzz must find from ten seeds; an hour and a half at most.
test-planted-errors: install
	$(BIN)/python -m pytest tests/unit/bench/fuzz/test_planted_errors.py tests/unit/bench/fuzz/test_reduction.py

# CASE=FILE: makes a failing case of `eesd bench exact --random` smaller.
fuzz-reduce: install
	$(BIN)/python -m tests.support.fuzz_reduction --case $(CASE)

test-slow: install
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -m 'hypothesis and not slow and not gpu' --hypothesis-profile search tests/unit tests/dist

check: install
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python infra/check_words.py
	$(BIN)/python infra/check_docstrings.py
	$(BIN)/python infra/check_documents.py
	$(BIN)/python infra/check_names.py
	$(BIN)/python infra/check_devices.py
	$(BIN)/python infra/write_references.py --check
	$(BIN)/yamllint --strict .
	$(BIN)/shellcheck .ci/run cluster/configs/node.sh infra/gpu/*.sh
	$(BIN)/python infra/check_commands.py
	$(BIN)/hadolint infra/docker/Dockerfile.*
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec infra/docker-compose.yaml

# The plot of the README, from records in docs/benchmarks.
plots: install
	$(BIN)/python infra/draw_plots.py

# The tables of the pages in docs.
references: install
	$(BIN)/python infra/write_references.py

format: install
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# On a machine with a GPU; `infra/gpu/check.sh --device cpu` shows that the checks themselves run.
gpu-check: install
	PYTHON=$(BIN)/python infra/gpu/check.sh

bench: install
	$(BIN)/eesd bench offline --quick

# 200 streams while processes are killed, hang and lose their connections.
bench-chaos: install
	$(BIN)/eesd bench chaos

# Controllers against each other, replayed and live; under fifteen minutes on two quiet cores.
bench-control: install
	$(BIN)/eesd bench control

# Three hosts of network namespaces on this machine: Linux, root and iproute2.
bench-hosts: install
	$(BIN)/python -m tests.support.hosts exact --tokens 2000

# The same as bench-chaos, with the pipeline spread over them and links cut between them.
bench-chaos-hosts: install
	$(BIN)/python -m tests.support.hosts chaos

# The service is started here, once with overlap and once without; port 8000 must be free.
bench-online: install
	@for overlap in true false; do \
	    echo "engine.scheduler.overlap=$$overlap"; \
	    $(BIN)/eesd serve --set engine.scheduler.overlap=$$overlap & service=$$!; \
	    until $(BIN)/python -c 'import httpx; httpx.get("http://127.0.0.1:8000/health", timeout=30, trust_env=False).raise_for_status()' 2>/dev/null; do \
	        kill -0 $$service 2>/dev/null || exit 1; sleep 2; \
	    done; \
	    $(BIN)/eesd bench online; status=$$?; \
	    kill -TERM $$service; wait $$service; \
	    [ $$status -eq 0 ] || exit $$status; \
	done
