# Two commands on a fresh Debian or Ubuntu do all the set-up: `make demo` and `make test`.
# Both install missing system packages through apt where they may (else they name them), and
# everything else into .venv; run again, they only do what has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/stamps
JOBS ?= $(shell nproc)
# Tests at a time: many wait, for time limits, launchers or slow storage.
WORKERS ?= $(shell expr $(JOBS) + 2)
# Python's compiled modules are kept, whatever the environment says: the tests import thousands.
export PYTHONDONTWRITEBYTECODE :=
FUZZ_SECONDS ?= 15
# Looked for when they are used: the same run may have installed them.
CLANG = $(firstword $(foreach v,clang++-14 clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++,$(if $(shell command -v $(v) 2>/dev/null),$(v))))
CLANG_FORMAT = $(firstword $(foreach v,clang-format-14 clang-format-19 clang-format-18 clang-format,$(if $(shell command -v $(v) 2>/dev/null),$(v))))
SOURCES := $(shell git ls-files native bindings mpi tools cmake python CMakeLists.txt pyproject.toml 2>/dev/null)
BENCHMARKS := $(shell git ls-files benchmarks/native benchmarks/nostall_bench benchmarks/CMakeLists.txt benchmarks/pyproject.toml 2>/dev/null)

.PHONY: ready address-build thread-build demo docs test wheel dlio-test dlio-bench trainers-test stores-test device-test native-test python-test build lint format sanitize sanitize-all fuzz campaign bench clean help

# Recipes share .venv, the network and the cores, and what compiles or tests uses all cores by itself.
ifneq ($(MAKECMDGOALS),ready)
.NOTPARALLEL:
endif

help:
	@echo "make demo      train on a slow file system, with and without nostall (under 5 minutes); the first time it"
	@echo "               installs system packages and 6 GB into .venv, most of it torch, and compiles for 3 minutes"
	@echo "make test      native and Python tests; the first time as for make demo, and it fetches MPICH and Slurm"
	@echo "make -j 2 ready  the package, and what sanitizers and fuzz targets need: downloads beside the compilers"
	@echo "make docs      the documentation as a site, with a search"
	@echo "make wheel     wheels for any Linux of glibc 2.28 or later, into dist/ (also with ARCH=aarch64)"
	@echo "make bench     nostall bench loader, with every peer that installs"
	@echo "make campaign  campaigns of faults at a small size (SCALE=1 ONLY=name for the published size)"
	@echo "make trainers-test | dlio-test  on Ray and DeepSpeed (310 MB), with DLIO and TensorFlow (1.6 GB)"
	@echo "make stores-test  on MinIO, Azurite and fake-gcs-server (900 MB; Go compiles two of them for minutes)"
	@echo "make dlio-bench  DLIO on emulated hosts, its own loader and nostall's (root)"
	@echo "make device-test  tests of the host on the simulated accelerator"
	@echo "make sanitize-all  the package and the MPI library under sanitizers as well (an hour)"
	@echo "make lint | sanitize | fuzz | format | clean"

$(STAMPS)/system: scripts/setup
	@scripts/setup build
	@mkdir -p $(STAMPS) && touch $@

# After the other: apt does one thing at a time.
$(STAMPS)/checkers: $(STAMPS)/system
	@scripts/setup check
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/venv: $(STAMPS)/system
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What compiles the native core and its tests, UCX among it: not the gigabytes of the Python tests.
$(STAMPS)/tools: pyproject.toml $(STAMPS)/venv
	@echo "installing build requirements into $(VENV)"
	@scripts/install $(BIN)/python build cluster
	@mkdir -p $(STAMPS) && touch $@

# The package builds for a user with what demo asks for; for the tests with the second MPI as well.
$(STAMPS)/demo-requirements: pyproject.toml benchmarks/pyproject.toml $(STAMPS)/venv
	@echo "installing build requirements, torch, torchvision and the command line into $(VENV) (torch of PyPI carries CUDA: 6 GB)"
	@scripts/install $(BIN)/python build benchmarks
	@mkdir -p $(STAMPS) && touch $@

# With `ready` after the checkers too, for playwright may run apt as well.
$(STAMPS)/requirements: $(STAMPS)/tools | $(if $(filter ready,$(MAKECMDGOALS)),$(STAMPS)/checkers)
	@echo "installing build and test requirements into $(VENV) (6 GB, most of it torch)"
	@scripts/install $(BIN)/python build test
	@command -v chromium >/dev/null || $(BIN)/python -m playwright install --with-deps chromium >/dev/null
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/demo-requirements

# MPICH and mpi4py's test suite.
$(STAMPS)/mpi-suite: scripts/mpi-suite $(STAMPS)/requirements
	@echo "fetching MPICH and the test suite of mpi4py into build"
	@scripts/mpi-suite $(CURDIR)/$(BIN)/python
	@touch $@

install = $(BIN)/python -m pip install -q --no-build-isolation --no-deps --force-reinstall
# CMake remembers where it found libraries.
gone = (echo "if a library of the system (an MPI, say) has gone since the last build: rm -r build/wheel"; exit 1)

$(STAMPS)/demo-package: $(STAMPS)/demo-requirements $(SOURCES)
	@echo "building and installing nostall into $(VENV) (3 minutes on 2 cores)"
	@$(install) . || $(gone)
	@touch $@

$(STAMPS)/package: $(STAMPS)/requirements $(STAMPS)/mpi-suite $(SOURCES)
	@echo "building and installing nostall into $(VENV) (3 minutes on 2 cores)"
	@$(install) --config-settings=cmake.define.NOSTALL_MPICH_PREFIX=$(CURDIR)/build/mpich . || $(gone)
	@touch $@ $(STAMPS)/demo-package

# After the package, whichever of the two was built.
$(STAMPS)/benchmarks: $(STAMPS)/demo-package $(BENCHMARKS)
	@echo "building and installing nostall-bench into $(VENV)"
	@$(install) ./benchmarks
	@touch $@

build: $(STAMPS)/package $(STAMPS)/benchmarks

demo: $(STAMPS)/demo-package $(STAMPS)/benchmarks
	@$(BIN)/nostall demo

test: native-test python-test

# Tests that skip are named; with CI set none may.
native_tests = $(BIN)/ctest --test-dir build/$(1) --no-tests=error --output-on-failure -j $(WORKERS) >build/$(1)/test.log || \
  { cat build/$(1)/test.log; exit 1; }; tail -n 3 build/$(1)/test.log; \
  ! grep -F '***Skipped' build/$(1)/test.log || [ -z "$$CI" ]

# In the package's build folder: what is tested is what is installed.
native-test: build
	@echo "native tests"
	@$(BIN)/cmake build/wheel -DNOSTALL_TESTS=ON -DNOSTALL_PRECOMPILE=ON >/dev/null
	@$(BIN)/cmake --build build/wheel -j $(JOBS) >build/wheel/build.log || (cat build/wheel/build.log; exit 1)
	@$(call native_tests,wheel)

python-test: build
	@scripts/slurm-suite
	@$(BIN)/python tests/device/build_simdev.py
	@scripts/stubs $(BIN)/python
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not alone"
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m alone $(shell grep -rl --include='*.py' mark.alone tests/python benchmarks/tests)

# Tests of the host on the simulated device (tests/device/on_device.py).
device-test: build
	@$(BIN)/python tests/device/build_simdev.py
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --device simdev \
	  $(addprefix tests/python/,loader torch sync checkpoint)

# Portable wheels: $(ARCH), by Zig's clang; those of this machine are tried in new environments of TRY, and
# so is the source distribution where there is what compiles it.
ARCH ?= $(shell uname -m)
TRY ?= $(PYTHON)
wheel:
	@scripts/setup wheel
	@$(PYTHON) scripts/wheel --arch $(ARCH) --jobs $(JOBS)
	@$(PYTHON) scripts/check-wheel $(if $(filter $(ARCH),$(shell uname -m)),--try $(TRY) --) dist/nostall*_$(ARCH).whl
	@$(if $(filter $(ARCH),$(shell uname -m)),$(PYTHON) scripts/check-sdist $$(ls -t dist/nostall-*.tar.gz | head -n 1))

# DLIO without DALI, which it wants as well; a path takes another one, with what it needs beside it.
DLIO ?= dlio-benchmark==2.*
# By what it is made of, so that another DLIO takes the place of the one before.
DLIO_HERE := build/dlio/.of-$(subst /,_,$(DLIO))
$(DLIO_HERE): | $(STAMPS)/requirements
	@echo "installing DLIO with TensorFlow into build/dlio (1.6 GB)"
	@[ -e build/dlio/.whole ] || { rm -rf build/dlio; $(BIN)/python scripts/requirements dlio | xargs -d '\n' $(BIN)/python -m pip install -q --target build/dlio && touch build/dlio/.whole; }
	@rm -rf build/dlio/.of-* build/dlio/dlio_benchmark*
	@$(BIN)/python -m pip install -q --no-deps --target build/dlio "$(DLIO)"
	@touch "$@"

# DLIO's own workloads on the plug-ins.
dlio-test: build | $(DLIO_HERE)
	@PYTHONPATH=$(CURDIR)/build/dlio $(BIN)/python -m pytest tests/dlio

DLIO_OPTIONS ?= --scale 0.03125 --memory 1536MiB --epochs 2
dlio-bench: build | $(DLIO_HERE)
	@$(if $(filter-out 0,$(shell id -u)),sudo) env PYTHONPATH=$(CURDIR)/build/dlio $(BIN)/nostall bench dlio $(DLIO_OPTIONS)

# Ray and DeepSpeed: 310 MB, half a minute to start a cluster, and minutes to compile at the first use, so
# they are no part of `make test`.
trainers-test: build
	@echo "installing Ray and DeepSpeed into build/trainers (310 MB)"
	@[ -d build/trainers ] || $(BIN)/python -m venv build/trainers
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  >"$$(build/trainers/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	@build/trainers/bin/python -m pip install -q wheel
	@$(BIN)/python scripts/requirements ray deepspeed | DS_BUILD_OPS=0 xargs -d '\n' build/trainers/bin/python -m pip install -q --no-build-isolation
	@build/trainers/bin/python -m pytest tests/trainers

# Servers of the protocols of S3, Azure and Google: Go compiles two of them for minutes, so they are no part
# of `make test`.
OBJECTS := tests/python/checkpoint/test_checkpoint_objects.py
stores-test: build
	@echo "making MinIO, Azurite and fake-gcs-server in build/stores"
	@scripts/store-servers $(CURDIR)/$(BIN)/python
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/stores
	@# MinIO checks the signatures of the headers that one test takes out
	@NOSTALL_TESTS_S3=minio $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	  --deselect $(OBJECTS)::test_a_store_without_conditional_writes_is_refused \
	  $(OBJECTS) tests/python/source/test_objects.py
	@NOSTALL_TESTS_S3=minio PYTHONPATH=tests $(BIN)/python -m campaigns objects

bench: build
	@scripts/install $(BIN)/python benchmarks.peers
	@$(BIN)/nostall bench loader

# The native tests and the fuzz targets under clang's AddressSanitizer and UndefinedBehaviorSanitizer
# are of one build; ThreadSanitizer is gcc's.
checked = $(BIN)/cmake -S . -B build/$(1) -G Ninja -DNOSTALL_PYTHON=OFF \
    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
    -DNOSTALL_TESTS=ON -DNOSTALL_PRECOMPILE=ON $(2) >/dev/null && \
  { $(BIN)/cmake --build build/$(1) -j $(JOBS) >build/$(1)/build.log || { cat build/$(1)/build.log; exit 1; }; }
checked_address = $(call checked,clang-address,-DNOSTALL_SANITIZE=address$(comma)undefined -DNOSTALL_FUZZ=ON -DCMAKE_CXX_COMPILER=$(CLANG))
checked_thread = $(call checked,thread,-DNOSTALL_SANITIZE=thread)
comma := ,

address-build: $(STAMPS)/checkers $(STAMPS)/tools
	@echo "building the native tests and fuzz targets with the address and undefined behaviour sanitizers"
	@$(checked_address)

thread-build: $(STAMPS)/checkers $(STAMPS)/tools
	@echo "building the native tests with the thread sanitizer"
	@$(checked_thread)

sanitize: address-build thread-build
	@echo "native tests under the address and undefined behaviour sanitizers"
	@$(call native_tests,clang-address)
	@echo "native tests under the thread sanitizer"
	@$(call native_tests,thread)

# The package, and what sanitizers and fuzz targets need. With make -j 2 compilers work while gigabytes of
# requirements are fetched; no test runs meanwhile.
ready: $(STAMPS)/package address-build thread-build

# Much longer (an hour on 2 cores), so not in continuous integration: the package, with bindings and the
# torch backend, under AddressSanitizer; the MPI library under ThreadSanitizer.
sanitize-all: sanitize $(STAMPS)/mpi-suite
	@echo "the package under the address and undefined behaviour sanitizers"
	@scripts/test-sanitized address,undefined build/python-address $(BIN)/python $(or $(TESTS),tests/python)
	@echo "the MPI library under the thread sanitizer"
	@scripts/test-sanitized thread build/python-thread $(BIN)/python tests/python/mpi/test_mpi.py

# Every fuzz target for FUZZ_SECONDS, on its corpus; new inputs go to build/, findings fail.
fuzz: address-build
	@scripts/run-fuzzers build/clang-address/fuzz $(FUZZ_SECONDS)

# Every campaign of tests/campaigns at its small size, two at a time for much of one is waiting; or
# those named by ONLY at SCALE.
campaign: $(STAMPS)/checkers build
	@PYTHONPATH=tests $(BIN)/python -m campaigns --jobs 2 $(ONLY) $(if $(SCALE),--scale $(SCALE))

# With -q it would let every warning pass.
site = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >build/site.log 2>&1 || { grep -v '^INFO' build/site.log; exit 1; }

lint: $(STAMPS)/checkers build
	@echo "layers, public names, documentation, clang-format, ruff, mypy"
	@scripts/stubs $(BIN)/python
	@$(BIN)/python scripts/check-layers
	@$(BIN)/python scripts/reference --check
	@$(BIN)/python scripts/check-docs
	@$(site)
	@scripts/check-locks $(CLANG) $(BIN)/python
	@git ls-files '*.cc' '*.h' '*.c' | xargs $(CLANG_FORMAT) --dry-run -Werror
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(STAMPS)/requirements
	@$(site)
	@echo "the site is in build/site: $(BIN)/python -m http.server -d build/site"

format:
	@git ls-files '*.cc' '*.h' '*.c' | xargs $(CLANG_FORMAT) -i
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf build $(VENV) nostall-demo nostall-bench python/nostall/_native*
