//! Errors carry what is wrong and what to do as two fields, in the whole workspace: read from its sources.
//!
//! That every kind of failure says what to do about it is the compiler's business: each crate's errors
//! are taken to a `Fault` by a `match` that leaves out none. What the compiler does not see is here: that
//! nobody puts both into one sentence, that nobody cuts one apart, and that only those failures have no
//! remedy about which a user can do nothing.

use std::fs;
use std::path::{Path, PathBuf};

/// Failures without a remedy, by file. A user can do nothing about them, or the system's own words say it
/// all, or what reports them adds what to do. A new one needs such a reason, too.
const BARE: &[(&str, usize)] = &[
    ("bench/src/vm/mod.rs", 1),
    ("crates/cli/src/bench.rs", 2),
    ("crates/cli/src/config.rs", 1),
    ("crates/cli/src/disk.rs", 2),
    ("crates/cli/src/pool.rs", 1),
    ("crates/cli/src/replay.rs", 1),
    ("crates/cli/src/swap.rs", 2),
    ("crates/cli/src/trace.rs", 1),
    ("crates/cli/src/usage.rs", 1),
    ("crates/config/src/reach.rs", 2),
    ("crates/console/src/accounts.rs", 2),
    ("crates/console/src/links.rs", 1),
    ("crates/console/src/server.rs", 10),
    ("crates/daemon/src/daemon/pins.rs", 3),
    ("crates/daemon/src/daemon/report.rs", 3),
    ("crates/engine/src/engine/disks.rs", 3),
    ("crates/engine/src/flash/checkpoint.rs", 1),
    ("crates/format/src/error.rs", 2),
    ("crates/mirror/src/mirror.rs", 1),
    ("crates/nbd-client/src/worker.rs", 4),
    ("crates/origin/src/child.rs", 3),
    ("crates/origin/src/imaged.rs", 2),
    ("crates/origin/src/owner.rs", 1),
    ("crates/origin/src/owner/rbd.rs", 4),
    ("crates/origin/src/owner/sidecar.rs", 1),
    ("crates/vhost/src/error.rs", 11),
];

/// Cuts in what other programs write, whose form says where.
const THEIRS: &[&str] = &[
    "bench/src/host.rs: .split(\": \")",
    "crates/origin/src/child.rs: .rsplit_once(\"}: \")",
];

/// Sources of tests alone.
const IN_TESTS: &[&str] = &["tests.rs", "life/world.rs"];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every source file of what users run, by its path in the workspace, without the tests at its end.
fn sources() -> Vec<(String, String)> {
    let root = workspace();
    let crates = fs::read_dir(root.join("crates")).expect("the crates");
    let mut folders: Vec<PathBuf> = crates
        .map(|c| c.expect("a crate").path().join("src"))
        .collect();
    folders.push(root.join("bench/src"));
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("a source file").path();
            let name = path.strip_prefix(&root).expect("below the workspace");
            let name = name.to_str().expect("a name").to_owned();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") && !IN_TESTS.iter().any(|t| name.ends_with(t)) {
                let text = fs::read_to_string(&path).expect("a source file");
                let code = text.split("#[cfg(test)]\nmod tests").next();
                found.push((name, code.unwrap_or_default().to_owned()));
            }
        }
    }
    found.sort();
    assert!(found.len() > 200, "only {} files were found", found.len());
    found
}

/// The strings in a piece of code.
fn literals(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut chars = code.chars();
    while chars.by_ref().any(|c| c == '"') {
        let mut literal = String::new();
        loop {
            match chars.next() {
                Some('\\') => literal.extend(chars.next()),
                Some('"') | None => break,
                Some(c) => literal.push(c),
            }
        }
        found.push(literal);
    }
    found
}

/// What stands in the brackets that open at the end of `opening`, wherever that occurs.
fn within<'a>(code: &'a str, opening: &str) -> Vec<&'a str> {
    let starts = code.match_indices(opening);
    let inner = starts.map(|(at, _)| {
        let rest = &code[at + opening.len()..];
        let (mut depth, mut quoted, mut escaped) = (1, false, false);
        let end = rest.find(|c| {
            match c {
                _ if escaped => escaped = false,
                '\\' if quoted => escaped = true,
                '"' => quoted = !quoted,
                '(' if !quoted => depth += 1,
                ')' if !quoted => depth -= 1,
                _ => {}
            }
            depth == 0
        });
        &rest[..end.unwrap_or(rest.len())]
    });
    inner.collect()
}

#[test]
fn no_sentence_is_cut_apart() {
    let cuts = [
        "split",
        "rsplit",
        "splitn",
        "rsplitn",
        "split_once",
        "rsplit_once",
        "find",
        "rfind",
    ];
    let mut wrong = Vec::new();
    for (file, code) in sources() {
        for cut in cuts {
            for argument in within(&code, &format!(".{cut}(")) {
                let found = format!("{file}: .{cut}({argument})");
                let mark = |text: &String| [": ", "; ", ". "].iter().any(|m| text.ends_with(m));
                let known = THEIRS.contains(&found.as_str());
                if !known && literals(argument).iter().any(mark) {
                    wrong.push(found);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_error_has_both_in_one_sentence() {
    let mut wrong = Vec::new();
    for (file, code) in sources() {
        for sentence in within(&code, "#[error(").into_iter().flat_map(literals) {
            if sentence.contains("; ") {
                wrong.push(format!("{file}: {sentence}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn who_can_do_something_is_told_what() {
    let makers = [
        "Fault::new(",
        "Failure::new(",
        "Error::new(",
        "Error::invalid(",
        "Error::conflict(",
        "Error::refused(",
        "Error::unavailable(",
    ];
    let (mut wrong, mut bare) = (Vec::new(), Vec::new());
    for (file, code) in sources() {
        for maker in makers {
            for arguments in within(&code, maker) {
                let last = arguments.trim_end().trim_end_matches(',');
                if last.ends_with("\"\"") || last.ends_with("String::new()") {
                    wrong.push(format!("{file}: {maker}{arguments})"));
                }
            }
        }
        let made = ["Fault::bare(", "Failure::bare("];
        let made: usize = made.iter().map(|maker| code.matches(maker).count()).sum();
        if made > 0 {
            bare.push((file, made));
        }
    }
    // Where there is none, `bare` says that it was thought of.
    wrong.retain(|made| !made.starts_with("crates/fault/src/lib.rs"));
    assert!(wrong.is_empty(), "{wrong:#?}");
    let known: Vec<(String, usize)> = BARE.iter().map(|(f, n)| ((*f).to_owned(), *n)).collect();
    assert_eq!(bare, known, "failures without a remedy; see the table");
}

/// The tests above see what they are to see.
#[test]
fn the_reader_reads() {
    assert_eq!(literals(r#"f("a; b", x, "c \"d\"")"#), ["a; b", "c \"d\""]);
    assert_eq!(within(r#"x.split("(").y(a(b), c)"#, ".y("), ["a(b), c"]);
    let cut = r#"x.split_once("; ").z()"#;
    assert_eq!(within(cut, ".split_once("), [r#""; ""#]);
}
