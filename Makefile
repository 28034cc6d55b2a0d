# make train | test | campaign | lint | install: each sets up .venv first when it is missing or older than what it is made from.
PYTHON ?= python3
ACCELERATE_CONFIG ?= accelerate_configs/fsdp.yaml
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test campaign lint install

train: $(STAMP)
	@$(BIN)/fullshard check --accelerate_config $(ACCELERATE_CONFIG) $(GPUS) --quiet $(ARGS)
	$(BIN)/accelerate launch --config_file $(ACCELERATE_CONFIG) $(GPUS) recipes/pretrain.py $(ARGS)

# One process per GPU; without one, what the YAML says.
train: GPUS = $(shell $(BIN)/python -c "import torch; n = torch.cuda.device_count(); print(f'--num_processes {n}' if n else '')")

test: $(STAMP)
	$(BIN)/python -m pytest tests

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
