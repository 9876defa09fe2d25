//! `hearth bench` on disks too small to measure anything: are the result files whole, do they
//! say the same, and is it polite when called off? No time is asserted.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::{binary, path};
use hearth_rig::wait;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Longest a called-off run may take to end: what is in flight and the clean-up, many times over.
const END_LIMIT: Duration = Duration::from_secs(60);

fn scratch() -> Result<tempfile::TempDir> {
    let parent = binary()?
        .parent()
        .and_then(Path::parent)
        .context("binary outside a target directory")?
        .join("e2e");
    std::fs::create_dir_all(&parent)?;
    Ok(tempfile::Builder::new().prefix("b").tempdir_in(parent)?)
}

fn bench(dir: &Path, args: &[&str]) -> Result<Command> {
    let mut command = Command::new(binary()?);
    command
        .args(["bench", "--flash", path(dir), "--out"])
        .arg(dir.join("out"))
        .args(["--quick", "--over", "vhost-user"])
        .args(args)
        .stdin(Stdio::null());
    if !args.contains(&"--size") {
        command.args(["--size", "16M"]);
    }
    Ok(command)
}

fn words(out: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&out.stderr),
        String::from_utf8_lossy(&out.stdout)
    )
}

/// Only the result files are left in the directory.
fn clean(dir: &Path) -> Result<()> {
    let left: Vec<_> = std::fs::read_dir(dir)?
        .filter_map(|e| Some(e.ok()?.file_name()))
        .filter(|name| name != "out")
        .collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

#[test]
fn result_files_are_whole_and_agree() -> Result<()> {
    let dir = scratch()?;
    let out = bench(dir.path(), &["--depth", "24"])?.output()?;
    ensure!(out.status.success(), "{}", words(&out));
    clean(dir.path())?;
    let file = |name: &str| std::fs::read_to_string(dir.path().join("out").join(name));
    let (json, md, html) = (
        file("results.json")?,
        file("results.md")?,
        file("results.html")?,
    );
    let report: Value = serde_json::from_str(&json)?;
    // A user is told what the cache changed, and nothing of this project's goals.
    let told = String::from_utf8(out.stdout)?;
    for word in [
        "SLOW DISK ALONE",
        "TIMES FASTER",
        "read 4 KiB, 24 at a time",
        "Once the cache is warm",
    ] {
        ensure!(told.contains(word), "{word}: {told}");
    }
    for text in [&told, &md, &html] {
        for word in [
            "goal", "GOAL", "Goal", "MISSED", "| met |", ">met<", ">missed<",
        ] {
            ensure!(!text.contains(word), "{word}: {text}");
        }
    }
    let summary = report["summary"].as_array().context("no summary")?;
    assert_eq!(summary.len(), 3, "read, write, mixed: {summary:?}");
    for line in summary {
        for figure in ["slow_alone", "cold", "warm", "flash_alone", "times_faster"] {
            ensure!(line[figure].as_f64() > Some(0.0), "{figure}: {line}");
        }
    }
    let facts = report["host"].as_array().context("no host")?;
    for name in [
        "kernel",
        "cpu",
        "hearth",
        "fio",
        "libblkio",
        "qemu",
        "slow disk",
        "run",
    ] {
        ensure!(
            facts.iter().any(|f| f["name"] == name && f["value"] != ""),
            "{name} is not named"
        );
    }
    ensure!(json.contains("MODEL of a 7200 rpm"), "not labelled");
    let tables = report["tables"].as_array().context("no tables")?;
    assert_eq!(tables.len(), 2);
    for table in tables {
        let texts = |key: &str| -> Vec<&str> {
            let list = table[key].as_array();
            list.into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect()
        };
        let (rows, columns) = (texts("rows"), texts("columns"));
        let cells = table["cells"].as_array().context("no cells")?;
        assert_eq!(cells.len(), rows.len() * columns.len());
        for cell in cells {
            let row = cell["row"].as_str().unwrap_or("");
            ensure!(rows.contains(&row) && columns.iter().any(|c| cell["column"] == *c));
            let points = cell["points"].as_array().context("no points")?;
            assert_eq!(points.len(), 1, "one round");
            let value = points[0]["value"].as_f64().context("no value")?;
            ensure!(value > 0.0, "{cell}");
            assert_eq!(cell["spread"]["median"].as_f64(), Some(value));
            let served = !row.ends_with("no server");
            assert_eq!(points[0]["server_us"].is_number(), served, "{cell}");
            assert_eq!(points[0]["flash_bytes"].is_number(), served, "{cell}");
            ensure!(md.contains(row) && html.contains(row), "{row} is missing");
        }
        let goals = table["goals"].as_array().context("no goals")?;
        ensure!(goals.is_empty(), "{goals:?}");
    }
    let file = dir.path().join("out/results.json");
    let out = Command::new(binary()?)
        .args(["bench", "compare", path(&file), path(&file), "--json"])
        .output()?;
    ensure!(out.status.success(), "{}", words(&out));
    let twin: Value = serde_json::from_slice(&out.stdout)?;
    assert_eq!((&twin["agree"], &twin["apart"]), (&true.into(), &0.into()));
    Ok(())
}

#[test]
fn a_run_called_off_keeps_what_it_has() -> Result<()> {
    // The first column is complete: results are kept, judged by the goals as asked.
    let report = call_off("50", "1", &["--goals"], |dir, _| {
        std::fs::read_to_string(dir.join("out/results.json")).is_ok_and(|r| r.contains("at-least"))
    })?;
    let (cells, goals) = (&report["tables"][0]["cells"], &report["tables"][0]["goals"]);
    ensure!(cells.as_array().is_some_and(|c| c.len() >= 7), "{cells}");
    ensure!(
        goals
            .as_array()
            .is_some_and(|g| g.iter().any(|g| g["wanted"] != "shown")),
        "{goals}"
    );
    Ok(())
}

#[test]
fn a_long_cell_is_called_off_within_it() -> Result<()> {
    call_off("1", "3600", &[], |_, said| {
        said.contains("slow disk alone: write")
    })
    .map(drop)
}

/// Starts a run of so many rounds and seconds per cell, calls it off once `begun` (of its directory
/// and what it has said), and looks at what it leaves; its report.
fn call_off(
    rounds: &str,
    seconds: &str,
    more: &[&str],
    begun: impl Fn(&Path, &str) -> bool,
) -> Result<Value> {
    let dir = scratch()?;
    let (said, printed) = (
        tempfile::NamedTempFile::new()?,
        tempfile::NamedTempFile::new()?,
    );
    let mut child = bench(
        dir.path(),
        &[
            "--rounds",
            rounds,
            "--seconds",
            seconds,
            "--depth",
            "1",
            "--table",
            "random",
            "--json",
        ],
    )?
    .args(more)
    .stdout(printed.reopen()?)
    .stderr(said.reopen()?)
    .spawn()?;
    let begun = wait::until("the run begins", END_LIMIT, || {
        let said = std::fs::read_to_string(said.path()).ok()?;
        begun(dir.path(), &said).then_some(())
    });
    // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let status = wait::until("the run ends", END_LIMIT, || {
        child.try_wait().ok().flatten()
    });
    if status.is_err() {
        child.kill()?;
        child.wait()?;
    }
    begun?;
    assert_eq!(status?.code(), Some(130));
    let text = std::fs::read_to_string(dir.path().join("out/results.json"))?;
    let report: Value = serde_json::from_str(&text)?;
    assert_eq!(report["called_off"], true);
    let printed: Value = serde_json::from_str(&std::fs::read_to_string(printed.path())?)?;
    assert_eq!(report, printed);
    clean(dir.path())?;
    Ok(report)
}

#[test]
fn what_is_missing_is_named() -> Result<()> {
    let dir = scratch()?;
    let nowhere = dir.path().join("nowhere");
    let mut command = Command::new(binary()?);
    let out = command
        .args(["bench", "--quick", "--flash", path(dir.path()), "--out"])
        .arg(dir.path().join("out"))
        .env("PATH", &nowhere)
        .output()?;
    ensure!(!out.status.success());
    ensure!(
        words(&out).contains("install the package fio"),
        "{}",
        words(&out)
    );
    let out = bench(dir.path(), &["--slow", path(&nowhere)])?.output()?;
    ensure!(!out.status.success());
    ensure!(
        words(&out).contains("is not a directory"),
        "{}",
        words(&out)
    );
    let out = bench(dir.path(), &["--size", "1T"])?.output()?;
    ensure!(!out.status.success());
    ensure!(
        words(&out).contains("MiB free") && words(&out).contains("--size"),
        "{}",
        words(&out)
    );
    let out = Command::new(binary()?)
        .args(["bench", "compare", path(&nowhere), path(&nowhere)])
        .output()?;
    ensure!(!out.status.success() && words(&out).contains("cannot read"));
    clean(dir.path())
}
