#!/usr/bin/env bash
# From nothing to a served NVFP4 MoE and a measured log-prob gap, on a machine with or without a GPU:
#   ./quickstart.sh            installs into .venv, writes quickstart-out/, takes under 12 minutes on two cores
# Steps and settings: examples/quickstart.py --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools/setup_venv.sh demo
exec "${QUADS_VENV:-.venv}/bin/python" examples/quickstart.py "$@"
