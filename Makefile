# make train | test | test-slow | test-all | test-transformers-4 | campaign | lint | install: each sets up .venv first when it is missing or older than what it is made from.
PYTHON ?= python3
ACCELERATE_CONFIG ?= accelerate_configs/fsdp.yaml
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

TRANSFORMERS_4 := $(VENV)/transformers-4

.PHONY: train test test-slow test-all test-transformers-4 campaign lint install

train: $(STAMP)
	@$(BIN)/fullshard check --accelerate_config $(ACCELERATE_CONFIG) $(GPUS) --quiet $(ARGS)
	$(BIN)/accelerate launch --config_file $(ACCELERATE_CONFIG) $(GPUS) recipes/pretrain.py $(ARGS)

# One process per GPU; without one, what the YAML says.
train: GPUS = $(shell $(BIN)/python -c "import torch; n = torch.cuda.device_count(); print(f'--num_processes {n}' if n else '')")

# What proves an installation: minutes on two cores. test-slow is the rest, test-all is both in one.
test: $(STAMP)
	$(BIN)/python -m pytest tests -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest tests -m slow

test-all: $(STAMP)
	$(BIN)/python -m pytest tests

# Do exports mean the same to transformers 4? It lies in a folder of its own and takes torch from .venv.
test-transformers-4: $(TRANSFORMERS_4)/.installed
	TRANSFORMERS_4=$(TRANSFORMERS_4) $(BIN)/python -m pytest tests/transformers_4.py

$(TRANSFORMERS_4)/.installed: tests/transformers_4.txt $(STAMP)
	rm -rf $(TRANSFORMERS_4)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TRANSFORMERS_4) -r $<
	@touch $@

# 9 minutes on two cores; ARGS="--seed 1" kills at other moments.
campaign: $(STAMP)
	$(BIN)/python tests/campaign.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@
