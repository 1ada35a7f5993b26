#!/usr/bin/env bash
# Patched wheels from upstream.lock and patches/: `overlay apply` with the same arguments, in an environment made for it on first use.
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/enter.sh"
enter queue -m overlay apply "$@"
