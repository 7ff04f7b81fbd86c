# Has uv use what pip is configured to use; for scripts/setup and scripts/test-engines.
#
# uv does not read pip's configuration, and a machine behind a mirror has it only there.
# (`pip config get` overlooks what only the system-wide file says, `list` does not.)

# take_pip_settings PYTHON: exports the index and the certificates, and sets `links`, the
# folders and pages to look for packages in, one a word. uv copies out of its cache, unless
# UV_LINK_MODE says otherwise.
take_pip_settings() {
    local config index cert
    config=$("$1" -m pip config list 2>/dev/null || true)
    pip_setting() { sed -n "s/^[a-z:]*\.$1='\(.*\)'\$/\1/p" <<<"$config" | head -n 1; }
    index=$(pip_setting index-url)
    cert=$(pip_setting cert)
    links=$(pip_setting find-links)
    [[ -z $index ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    [[ -z $cert ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}
    export UV_LINK_MODE=${UV_LINK_MODE:-copy}
}
