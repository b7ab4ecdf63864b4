# Everything a person runs from a checkout. `make` alone lists it.
#
# Every target that needs Python makes .venv first, from requirements/cpu.lock or gpu.lock, and again when the lock or
# pyproject.toml changes. Targets that test add cpu-test.lock or gpu-test.lock to the same .venv. An install that was cut
# off is continued by the next make.

# A run file, and more arguments for `train`, `test`, `up` and `down`.
RUNFILE ?= examples/arithmetic.toml
ARGS ?=
# What `make quick` looks at.
QUICK ?= tests/unit tests/test_architecture.py
# How many faults `make chaos` draws, and from which seed.
FAULTS ?= 100
SEED ?= 0
# How many rounds `make soak` trains.
ROUNDS ?= 2500
# A Python 3.11-3.14. Empty: the first one found.
PYTHON ?=
PYTHONS := python3.11 python3 python3.12 python3.13 python3.14
# cpu or gpu. Empty: what .venv was made for, else gpu where nvidia-smi lists one.
MILLRACE_DEVICE ?=
# A second package index to take torch's +cpu build from, if pip's own does not have it (requirements/README.md).
TORCH_CPU_INDEX ?=
# Where `make lock` looks for that build.
CPU_LOCK_ARGS ?= $(if $(TORCH_CPU_INDEX),--index $(TORCH_CPU_INDEX) --index-strategy unsafe-best-match)

INSTALLED := .venv/.installed
TESTS_INSTALLED := .venv/.installed-test
LOG := .venv/install.log
AUDIT := .venv/audit/bin/pip-audit
MADE_FOR := $(shell cat .venv/.device 2>/dev/null)
DEVICE := $(or $(MILLRACE_DEVICE),$(MADE_FOR),$(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))
ifeq ($(filter cpu gpu,$(DEVICE)),)
$(error MILLRACE_DEVICE is "$(DEVICE)": it can be cpu or gpu)
endif

FIRST_INSTALL := $(if $(filter cpu,$(DEVICE)),3–4 minutes and 4.9 GB,several minutes) the first time
PIP_INSTALL := .venv/bin/python -m pip install --no-deps --no-input --disable-pip-version-check --progress-bar off

.ONESHELL:
.SHELLFLAGS := -euc
.DEFAULT_GOAL := help
.PHONY: help packages train quick test test-all lint chaos soak audit audit-if-reachable up down lock clean FORCE

help: ## this list
	@echo "Millrace: make TARGET [VARIABLE=value ...]"
	awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile

# What the run file's folder says it needs beside the lock.
packages: $(INSTALLED)
	@needs=$(dir $(RUNFILE))requirements.txt
	if [ -f "$$needs" ]; then
	    $(PIP_INSTALL) -q -r "$$needs"
	    ln -sfn "$$(cd .venv/lib && echo python3.*)" .venv/lib/python  # a run file names what is there under any Python
	fi

train: packages ## train a policy: RUNFILE=examples/arithmetic.toml, ARGS="more arguments"
	.venv/bin/millrace train $(RUNFILE) $(ARGS)

quick: $(TESTS_INSTALLED) ## run the unit tests that need no server, no engine and no processes of their own: minutes
	.venv/bin/python -m pytest $(QUICK) -m 'not (slow or server or engine)' $(ARGS)

test: $(TESTS_INSTALLED) ## run all tests but the slow ones: ARGS="-k name" or any other pytest arguments
	.venv/bin/python -m pytest $(ARGS)

test-all: $(TESTS_INSTALLED) ## run the slow tests too, twice as long: more faults, deployments, benchmarks in small
	.venv/bin/python -m pytest -m '' $(ARGS)

lint: $(TESTS_INSTALLED) ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/mypy

chaos: $(TESTS_INSTALLED) ## faults by the hundred at one run: FAULTS=200 SEED=1
	MILLRACE_CHAOS_FAULTS=$(FAULTS) MILLRACE_CHAOS_SEED=$(SEED) .venv/bin/python -m pytest tests/chaos -m '' $(ARGS)

soak: $(INSTALLED) ## what a long run grows by, memory and disk, into docs/soak.json: ROUNDS=2500
	.venv/bin/python -m benchmarks.orchestration --rounds $(ROUNDS) --json docs/soak.json

$(AUDIT): | $(INSTALLED)
	.venv/bin/python -m venv .venv/audit
	.venv/audit/bin/pip install -q --disable-pip-version-check pip-audit

audit: $(AUDIT) ## look up known vulnerabilities of every package in the locks (pip-audit, over the network)
	sed 's/+cpu//' requirements/$(DEVICE).lock requirements/$(DEVICE)-test.lock >.venv/audit/lock.txt
	$(AUDIT) --strict --no-deps --disable-pip --progress-spinner off -r .venv/audit/lock.txt

# For CI: if the package index that pip-audit asks is out of reach, or keeps no such data, this says so and succeeds.
audit-if-reachable: $(INSTALLED)
	@echo 'pip==24.0' >.venv/audit-probe.txt
	if $(MAKE) -s $(AUDIT) && $(AUDIT) --format json --no-deps --disable-pip --progress-spinner off -r .venv/audit-probe.txt \
	    2>/dev/null | grep -q '"vulns"'; then
	    $(MAKE) audit
	else
	    echo "audit: the package index gives no answer about vulnerabilities here, so none were looked up"
	fi

up: $(INSTALLED) ## start the Prefect and MLflow services and a worker
	.venv/bin/millrace up $(ARGS)

down: ## stop what `make up` started
	@if [ -x .venv/bin/millrace ]; then
	    .venv/bin/millrace down $(ARGS)
	else
	    echo "Nothing to stop: there is no .venv here."
	fi

lock: ## resolve requirements/*.lock again (requirements/README.md): LOCK_ARGS="--upgrade"
	@CPU_LOCK_ARGS="$(CPU_LOCK_ARGS)" LOCK_ARGS="$(LOCK_ARGS)" requirements/build_lock.sh

clean: ## remove .venv and caches; runs and their data stay
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The two builds of vLLM share one folder, so a .venv for the other device is made anew.
ifneq ($(DEVICE),$(MADE_FOR))
$(INSTALLED): FORCE
endif

# Shell functions of both installs. pip writes INSTALLER near the end of a package: without it the package was cut off and
# pip would take it for whole.
define INSTALLING
fail() { printf '%s\n' "$$@" >&2; exit 1; }
pip_failed() {
    grep -E '^ *(ERROR|error|[A-Za-z]+Error):' $(LOG) >&2 || tail -n 5 $(LOG) >&2
    fail "Installing stopped here; the whole log is $(LOG). The next make continues from this point."
}
remove_halves() {
    for package in .venv/lib/python3*/site-packages/*.dist-info; do
        [ -f "$$package/INSTALLER" ] || rm -rf "$$package"
    done
}
endef

# The state folder of every run file below, wherever one stands.
.millrace:
	@mkdir -p .millrace

$(INSTALLED): requirements/$(DEVICE).lock pyproject.toml | .millrace
	@$(INSTALLING)
	[ "$$(uname -s)" = Linux ] || fail "Millrace installs on Linux (vLLM's wheels are for Linux only): use a container or WSL."
	if [ -n "$(MADE_FOR)" ] && [ "$(MADE_FOR)" != $(DEVICE) ]; then
	    echo "Removing the .venv made for $(MADE_FOR): this one is for $(DEVICE)."
	    rm -rf .venv
	fi

	if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
	    python= without_venv=
	    for candidate in $(or $(PYTHON),$(PYTHONS)); do
	        "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null || continue
	        if "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$$candidate; break; fi
	        without_venv=$$candidate
	    done
	    if [ -z "$$python" ] && [ -n "$$without_venv" ]; then
	        fail "$$without_venv cannot make virtual environments (it has no ensurepip)." \
	            "On Debian or Ubuntu: sudo apt install python3-venv. Or name another: make PYTHON=/path/to/python3.11"
	    fi
	    [ -n "$$python" ] || fail "Millrace needs Python 3.11 to 3.14; tried: $(or $(PYTHON),$(PYTHONS))." \
	        "Install one (Debian or Ubuntu: sudo apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3.11"
	    echo "[1/3] creating .venv with $$python"
	    "$$python" -m venv --clear .venv
	fi
	echo $(DEVICE) >.venv/.device

	remove_halves
	torch=$$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements/$(DEVICE).lock)
	: >$(LOG)
	case $$torch in *+cpu)
	    echo "[2/3] installing $$torch (190 MB)"
	    $(PIP_INSTALL) "$$torch" >>$(LOG) 2>&1 ||
	        { [ -n "$(TORCH_CPU_INDEX)" ] && $(PIP_INSTALL) --index-url "$(TORCH_CPU_INDEX)" "$$torch" >>$(LOG) 2>&1; } || {
	        echo "pip found no $$torch. Name the index of PyTorch's CPU builds with make TORCH_CPU_INDEX=URL (PyTorch's" \
	            "\"Get started\" page shows the URL), or put the wheel into a folder and pass PIP_FIND_LINKS=folder." >&2
	        pip_failed
	    }
	esac
	echo "[3/3] installing $$(grep -c == requirements/$(DEVICE).lock) packages ($(FIRST_INSTALL); tail -f $(LOG) shows them)"
	$(PIP_INSTALL) -r requirements/$(DEVICE).lock >>$(LOG) 2>&1 || pip_failed
	$(PIP_INSTALL) --no-build-isolation -e . >>$(LOG) 2>&1 || pip_failed
	touch $@

$(TESTS_INSTALLED): $(INSTALLED) requirements/$(DEVICE)-test.lock
	@$(INSTALLING)
	remove_halves
	: >$(LOG)
	echo "installing $$(grep -c == requirements/$(DEVICE)-test.lock) packages of the tests (850 MB the first time; tail -f $(LOG) shows them)"
	$(PIP_INSTALL) -r requirements/$(DEVICE)-test.lock >>$(LOG) 2>&1 || pip_failed
	touch $@
