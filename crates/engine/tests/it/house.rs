//! Which room of the engine may know which: read from its sources, held against a table.
//!
//! The engine's owners (flash, cache, origin, disk) are rooms with doors of their own. A path such as
//! `crate::flash::log` in a file of another room is an arrow between the two, and every arrow has to stand in
//! [`ALLOWED`]. What needs more than that belongs where owners meet ([`TOP`]).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, iter};

/// What each room may use. Rooms that see everything are in [`TOP`].
const ALLOWED: &[(&str, &[&str])] = &[
    ("api", &[]),
    ("faults", &[]),
    ("paths", &[]),
    ("sync", &[]),
    ("tally", &[]),
    ("ctx", &[]),
    ("ids", &[]),
    ("blocks", &[]),
    ("stats", &["api", "tally"]),
    (
        "flash",
        &["api", "blocks", "ctx", "faults", "paths", "stats"],
    ),
    ("cache", &["api", "ctx", "ids", "sync"]),
    ("origin", &["api", "blocks", "ids", "stats"]),
    ("disk", &["api", "blocks", "ids", "origin", "stats"]),
    ("lanes", &["api", "cache", "faults", "stats", "sync"]),
];

/// Rooms in which owners meet: they may use everything, and each other.
const TOP: &[&str] = &["check", "core", "engine", "lib", "request", "rounds"];

/// The room a source file belongs to.
fn room(file: &str) -> &str {
    let end = file.find(['/', '.']).expect("a path to a source file");
    &file[..end]
}

/// Code without comments and without the tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or("");
    let lines = text.lines().map(|l| l.split("//").next().unwrap_or(""));
    lines.flat_map(|l| [l, "\n"]).collect()
}

/// First names of the paths that begin with `crate::`.
fn names(code: &str) -> BTreeSet<String> {
    let first = |s: &str| -> String {
        let name = s.trim_start().chars();
        name.take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect()
    };
    let mut out = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            None => out.extend(iter::once(first(rest))),
            Some(list) => {
                let (mut depth, mut begins) = (1, true);
                for (at, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        _ if begins && depth == 1 && !c.is_whitespace() => {
                            out.insert(first(&list[at..]));
                        }
                        _ => {}
                    }
                    begins = c == ',' || begins && c.is_whitespace();
                    if depth == 0 {
                        break;
                    }
                }
            }
        }
    }
    out
}

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("the sources are there") {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// Every file's arrows to other rooms.
fn arrows() -> BTreeSet<(String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let known = |name: &str| ALLOWED.iter().any(|(r, _)| *r == name) || TOP.contains(&name);
    let mut out = BTreeSet::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("a source is text");
        let file = path.strip_prefix(&src).expect("below it");
        let file = file.to_str().expect("plain names").to_owned();
        // Tests of a room may build a whole engine around it.
        if file.ends_with("/tests.rs") {
            continue;
        }
        let code = code(&text);
        assert!(
            known(room(&file)),
            "{file}: say in ALLOWED what the new room may use"
        );
        // In a room's folder `super` is the room.
        let out_of_it = if file.contains('/') {
            "super::super"
        } else {
            "super::"
        };
        assert!(
            !code.contains(out_of_it),
            "{file}: say `crate::`, so that arrows can be read"
        );
        for name in names(&code) {
            // What the crate shows to others is not used from inside under that name.
            let is_type = name.starts_with(|c: char| c.is_uppercase());
            assert!(
                known(&name) && !is_type,
                "{file}: `crate::{name}` is no room"
            );
            if name != room(&file) {
                out.insert((file.clone(), name));
            }
        }
    }
    assert!(out.len() > 50, "the sources are not read as they should be");
    out
}

#[test]
fn owners_know_no_more_than_they_may() {
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    let arrows = arrows();
    let forbidden: BTreeSet<_> = arrows
        .iter()
        .filter(|(file, to)| {
            let from = room(file);
            !TOP.contains(&from) && !allowed[from].contains(&to.as_str())
        })
        .collect();
    assert!(
        forbidden.is_empty(),
        "not allowed to know each other: {forbidden:#?}"
    );
    let unused = |(room, to): &(&str, &str)| {
        let mut uses = arrows.iter();
        !uses.any(|(file, used)| self::room(file) == *room && used == to)
    };
    let table = ALLOWED
        .iter()
        .flat_map(|(room, uses)| uses.iter().map(|to| (*room, *to)));
    let stale: Vec<_> = table.filter(unused).collect();
    assert!(stale.is_empty(), "take these out of ALLOWED: {stale:#?}");
}

#[test]
fn the_table_has_no_circle() {
    let mut left: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    while !left.is_empty() {
        let free: Vec<&str> = left
            .iter()
            .filter(|(_, uses)| uses.iter().all(|u| !left.contains_key(u)))
            .map(|(room, _)| *room)
            .collect();
        assert!(!free.is_empty(), "a circle among {:?}", left.keys());
        left.retain(|room, _| !free.contains(room));
    }
}

#[test]
fn paths_are_found_however_they_are_written() {
    let text = "\
        use crate::api::{DiskId, Effects};\n\
        use crate::{cache::index, disk::{Disk, grow}, stats};\n\
        // crate::comment::is_none\n\
        fn f(x: crate::flash::log::Item) {}\n\
        #[cfg(test)]\nmod tests {\n    use crate::engine::Engine;\n}\n";
    let found: Vec<String> = names(&code(text)).into_iter().collect();
    assert_eq!(found, ["api", "cache", "disk", "flash", "stats"]);
}
