# shellcheck shell=bash
# Sourced by the commands beside it: finds a Python, and goes on in an environment of the project's (overlay/environments).

root=$(cd -P -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)

unset PYTHONHOME PYTHONPLATLIBDIR PYTHONINSPECT PYTHONSTARTUP  # of another Python, or for a person at its prompt

fail() {
  printf 'overlay: %s\n' "$1" >&2
  exit 1
}

# Sets `interpreter` to that of environment $1, from the note that overlay.environments.remember wrote there: without
# starting a Python, which alone can take a tenth of a second where a version manager stands before it.
remembered() {
  local folder=${HOME-}/.cache note format chosen pins
  [[ $OSTYPE != darwin* ]] || folder=${HOME-}/Library/Caches
  [[ ${XDG_CACHE_HOME-} != /* ]] || folder=$XDG_CACHE_HOME
  note=$folder/modeling-overlay/environments/$1
  [[ -r $note ]] || return
  {
    IFS= read -r format && IFS= read -r interpreter && IFS= read -r chosen && pins=$(cat)
  } <"$note" || return
  [[ $format == 'environment 1' && $chosen == "${PYTHON-}" ]] || return
  [[ -x $interpreter && -e ${interpreter%/bin/python}/complete ]] || return
  [[ $pins == "$(LC_ALL=C; cat -- "$root"/overlay/environments/*.txt "$root"/overlay/environments/*/*.txt)" ]]
}

# Sets `found` to a Python that is new enough and runs: a name on PATH may be no more than a version manager's promise.
find_python() {
  local names=(python3 python3.14 python3.13 python3.12 python3.11)
  [[ -z ${PYTHON-} ]] || names=("$PYTHON")
  for found in "${names[@]}"; do
    if "$found" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1; then
      return
    fi
  done
  [[ -z ${PYTHON-} ]] || fail "PYTHON is $PYTHON, which is no Python 3.11 or later that runs: set it to one, or unset it"
  fail 'no Python 3.11 or later was found on PATH: install one, or set PYTHON to its path'
}

# enter ENVIRONMENT ARGUMENT...: become that environment's Python, made if it is not there, with this checkout on its path.
enter() {
  local interpreter='' found
  command -v git >/dev/null || fail 'git was not found on PATH: install it'
  if remembered "$1"; then
    shift
    PYTHONPATH=$root exec "$interpreter" -P "$@"
  fi
  find_python
  # Not in a subshell, which would leave it running where a signal ends this one.
  PYTHONPATH=$root exec "$found" -P -S -m overlay.environments "$1" -P "${@:2}"
}
