# What every script needs: the repository's root, a Rust toolchain that is new enough, and words.
# Sourced, never run.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# Keep in step with rust-version in Cargo.toml.
RUST_MINOR_MIN=88

# Some systems keep mke2fs and its like from ordinary users.
PATH=$PATH:/usr/sbin:/sbin

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
note() { printf '   %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# True if the cargo and rustc in directory $1 (or on the PATH if empty) are new enough.
rust_new_enough() {
    local prefix=${1:+$1/} version
    version=$("${prefix}rustc" --version 2>/dev/null) || return 1
    "${prefix}cargo" --version >/dev/null 2>&1 || return 1
    [[ $version =~ ^rustc\ 1\.([0-9]+)\. ]] && ((BASH_REMATCH[1] >= RUST_MINOR_MIN))
}

# Puts a new enough toolchain on the PATH; fails if there is none.
use_rust() {
    local dir
    rust_new_enough "" && return 0
    for dir in "${CARGO_HOME:-$HOME/.cargo}/bin" $(ls -d /usr/lib/rust-1.*/bin 2>/dev/null | sort -rV); do
        if rust_new_enough "$dir"; then
            PATH=$dir:$PATH
            export PATH
            return 0
        fi
    done
    return 1
}

# Where cargo puts what it builds.
target_dir() { printf '%s' "${CARGO_TARGET_DIR:-$ROOT/target}"; }

# Builds what users run, and has the end-to-end tests run that. HEARTH_BIN names another binary: then nothing is built.
release_for_tests() {
    export RUST_LIB_BACKTRACE=0
    use_rust || die "no Rust 1.$RUST_MINOR_MIN or newer; run scripts/setup.sh"
    if [[ -n ${HEARTH_BIN:-} ]]; then
        [[ -x $HEARTH_BIN ]] || die "HEARTH_BIN=$HEARTH_BIN is no program"
        HEARTH_BIN=$(realpath "$HEARTH_BIN")
        export HEARTH_BIN
        cd "$ROOT"
        return 0
    fi
    cd "$ROOT"
    cargo build --release --locked -p hearth
    HEARTH_BIN="$(target_dir)/release/hearth"
    export HEARTH_BIN
}

# Moves the debug information of binary $1 to $1.debug. Function names stay: people read the backtrace of a panic. The
# binary is replaced, not rewritten: cargo keeps a hard link to it, and links it here again at its next build.
split_debug() {
    local binary=$1
    if ! command -v objcopy >/dev/null; then
        note "no objcopy (package binutils): $binary keeps its debug information"
        return 0
    fi
    readelf -SW "$binary" | grep -E '[.]debug_(info|line)' >/dev/null || return 0
    objcopy --only-keep-debug --compress-debug-sections "$binary" "$binary.debug"
    (cd "$(dirname -- "$binary")" && objcopy --strip-debug --add-gnu-debuglink="${binary##*/}.debug" "${binary##*/}" "${binary##*/}.stripped")
    mv -f "$binary.stripped" "$binary"
}

# Runs end-to-end tests one at a time, in full words; $@ are options of scripts/run-tests.py, such as --only MODULE.
e2e_tests() { "$ROOT/scripts/run-tests.py" --jobs 1 --verbose --below tests/e2e "$@" --locked -p hearth-e2e; }

# Builds the console's page, which the binary takes in when it is compiled. Without Node, or without a way to
# npm's packages, the binary has a page that says so, and everything else.
build_console() {
    local page=$ROOT/console/dist/index.html major
    if [[ -e $page ]] && [[ -z $(find "$ROOT/console" "$ROOT/docs/openapi.json" -path "$ROOT/console/node_modules" -prune -o -path "$ROOT/console/dist" -prune -o -path "$ROOT/console/tests" -prune -o -name openapi.d.ts -o -type f -newer "$page" -print -quit) ]]; then
        return 0
    fi
    major=$(node -p 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0)
    if ((major < 18)) || ! command -v npm >/dev/null; then
        note "no Node.js 18 or newer with npm: this build has no console page"
        return 0
    fi
    # Not `npm ci`: it wants the lock to know the builds for other systems as well, which not every registry has.
    if ! (cd "$ROOT/console" && npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel error >/dev/null && npm run --silent build); then
        note "the console's page could not be built, see above: this build has none"
    fi
}
