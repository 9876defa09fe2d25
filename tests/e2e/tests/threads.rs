//! What the daemon does when the ground gives way beneath it: too few descriptors, a thread that
//! dies or hangs.

use anyhow::{Context, Result, ensure};
use hearth_e2e::Hearth;

const MIB: u64 = 1 << 20;

/// Puts limits on open files, soft and hard, in front of the daemon.
fn open_files(hearth: &mut Hearth, limits: &str) {
    hearth.wrap = vec!["prlimit".to_owned(), format!("--nofile={limits}")];
}

/// With twenty descriptors the daemon refuses to start, in a sentence, instead of dying half-way.
#[test]
fn too_few_descriptors_are_refused() -> Result<()> {
    let mut hearth = Hearth::with_pool("256M")?;
    for limit in [8, 12, 20, 40, 100] {
        open_files(&mut hearth, &format!("{limit}:{limit}"));
        let words = hearth.start_refused()?;
        ensure!(!words.contains("panicked"), "{limit}: {words}");
        ensure!(
            words.contains(&format!("limit on open files is {limit}"))
                && words.contains("LimitNOFILE"),
            "{limit}: does not say what to do: {words}"
        );
    }
    Ok(())
}

/// What the process may raise by itself, it raises.
#[test]
fn the_limit_on_open_files_is_raised() -> Result<()> {
    let mut hearth = Hearth::with_pool("256M")?;
    open_files(&mut hearth, "64:4000");
    hearth.start()?;
    let pid = hearth.pid().context("runs")?;
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = limits
        .lines()
        .find(|l| l.starts_with("Max open files"))
        .context("no such limit")?;
    let words: Vec<&str> = line.split_whitespace().collect();
    ensure!(words[3] == "4000" && words[4] == "4000", "{line}");
    let origin = hearth.origin("o.img", MIB)?;
    hearth.add("d", origin.to_str().context("a path")?, &[])?;
    Ok(())
}
