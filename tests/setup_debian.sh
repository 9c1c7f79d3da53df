#!/bin/sh
# What the tests use of Debian's packages, where that may be installed: root, and a reachable mirror. Without it tests are
# skipped and say so. The server that Debian starts by itself is stopped: tests start their own.
set -eu

if command -v redis-server >/dev/null && command -v redis-cli >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "redis-server is not installed, and this user cannot: tests of the directory server will be skipped" >&2
	exit 0
fi
# Without a policy against it, installing would start a server on the usual port.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
(apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server) >/dev/null 2>&1 ||
	echo "redis-server could not be installed: tests of the directory server will be skipped" >&2
