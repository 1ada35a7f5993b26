#!/usr/bin/env bash
# The tests, all or some (tests/__main__.py), in an environment that is made on first use.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/enter.sh"
enter test -m tests "$@"
