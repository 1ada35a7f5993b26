#!/usr/bin/env bash
# Patched wheels from upstream.lock and patches/: `overlay apply`, in an environment that is made on first use.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # somebody typed `sh` before it
set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/enter.sh"
enter queue -m overlay apply "$@"
