#!/bin/sh
# Makes sure that Chromium is here for tests/report/test_browser.py; with the argument "none", does nothing.
[ "$1" = none ] && exit 0
[ -n "$TINYLM_TEST_BROWSER" ] && exit 0
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo "The tests of the report need Chromium, which is not installed. On Debian and Ubuntu: sudo apt-get install" \
    "chromium. Elsewhere, set TINYLM_TEST_BROWSER to the path of Chromium, Chrome or Edge. To leave these tests" \
    "out: BROWSER=none make test." >&2
exit 1
