#!/usr/bin/env bash
# The tests, all or some (tests/__main__.py), in an environment that is made on first use.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # somebody typed `sh` before it
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/enter.sh"
enter test -m tests "$@"
