#!/bin/sh
# What demos and tests use of Debian's packages, where that may be installed: root, and a reachable mirror. It never fails: what
# is not there is said, and what needs it is skipped. Mirrors are asked once; the folder below remembers (rm -r it to ask again).
set -u

MIRROR_DEADLINE_S=180 # for each call
ASKED=.cache/setup_debian

missing=""
need() { # COMMAND PACKAGE
	command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need redis-server redis-server
need redis-cli redis-tools
need ip iproute2
need tc iproute2
need openssl openssl
need promtool prometheus
need chromium chromium # 100 MB
[ -n "$missing" ] || exit 0

skipped() { # REASON
	echo "setup: missing$missing; $1. Tests that need them will be skipped." >&2
	exit 0
}
[ "$(id -u)" = 0 ] || skipped "this user cannot install packages"
command -v apt-get >/dev/null 2>&1 || skipped "there is no apt-get"
[ ! -e "$ASKED" ] || skipped "they could not be installed before"
mkdir -p "$ASKED" 2>/dev/null || skipped "$ASKED cannot be made"

# RUNLEVEL=1: a policy against starting services, else there would be a server on Redis's usual port.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
log="$ASKED/log"
apt() { timeout "$MIRROR_DEADLINE_S" apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@" >>"$log" 2>&1 </dev/null; }
apt update
failed=""
for package in $missing; do # one by one: the largest may take too long
	apt install -y --no-install-recommends "$package" || failed="$failed $package"
done
missing=$failed
[ -z "$missing" ] || skipped "apt-get could not install them: $(tail -n 1 "$log")"
rm -r "$ASKED"
