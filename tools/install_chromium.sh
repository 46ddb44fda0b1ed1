#!/bin/sh
# Installs Chromium, in which tests look at the report pages, with the system's package manager: `make browser`, and `.ci/run` before the tests.
# Where it cannot, it prints one line that says what is missing and the command, and still exits with 0: those tests are then skipped.
set -u

found() {
    [ -x "${LIGHTNING_3D_CHROMIUM:-}" ] && return 0
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        command -v "$name" >/dev/null 2>&1 && return 0
    done
    return 1
}

# The commands of this system's package manager, separated by `&&`; fails where there is none that is known.
commands() {
    if command -v apt-get >/dev/null 2>&1; then echo "apt-get -q update && apt-get -q install -y --no-install-recommends chromium"
    elif command -v dnf >/dev/null 2>&1; then echo "dnf install -y chromium"
    elif command -v apk >/dev/null 2>&1; then echo "apk add --no-cache chromium"
    else return 1
    fi
}

missing() {
    echo "Chromium is missing ($1): the tests of the report pages are skipped. $2"
    exit 0
}

found && exit 0
install=$(commands) || missing "no apt-get, dnf or apk was found" "Install Chromium and set LIGHTNING_3D_CHROMIUM to its path."
if [ "$(id -u)" = 0 ]; then as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then as_root="sudo -n"
else missing "installing it needs root" "Install it as root: $install"
fi
echo "Installing Chromium: $install"
log=$(mktemp)
DEBIAN_FRONTEND=noninteractive timeout 600 $as_root sh -c "$install" >"$log" 2>&1 </dev/null || tail -n 5 "$log"
rm -f "$log"
found || missing "its installation failed" "To try again as root: $install"
