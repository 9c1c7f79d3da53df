#!/bin/sh
# What the tests use of Debian's packages, where that may be installed: root, and a reachable mirror. Without it tests are
# skipped and say so. The server that Debian starts by itself is stopped: tests start their own.
set -eu

updated=no

# need PROGRAM PACKAGE WHAT: install the package that has the program, or say which tests will be skipped.
need() {
	if command -v "$1" >/dev/null; then return; fi
	if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
		echo "$2 is not installed, and this user cannot: tests of $3 will be skipped" >&2
		return
	fi
	if [ $updated = no ]; then
		apt-get update -qq >/dev/null 2>&1 || true
		updated=yes
	fi
	# Without RUNLEVEL, and a policy against it, installing would start a server on the usual port.
	DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$2" >/dev/null 2>&1 ||
		echo "$2 could not be installed: tests of $3 will be skipped" >&2
}

need redis-server redis-server "the directory server"
need chromium chromium "the dashboard in a browser"
