#!/usr/bin/env bash
# The tests: all of them, or what the arguments say (see tests/__main__.py), in an environment made for them on first use.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/enter.sh"
enter test -m tests "$@"
