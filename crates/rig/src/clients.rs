//! Other people's programs: run them, and say so when one is missing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Finds `program` on the PATH.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|p| p.is_file())
}

/// True if all of `programs` are there; otherwise says that the test `test` is skipped and why.
pub fn have(test: &str, programs: &[&str]) -> bool {
    match programs.iter().find(|p| find(p).is_none()) {
        None => true,
        Some(missing) => {
            println!("SKIPPED {test}: {missing} is not installed");
            false
        }
    }
}

/// True if the distribution's Python has libnbd's module; otherwise says that `test` is skipped.
pub fn have_python_nbd(test: &str) -> bool {
    let there = Command::new("/usr/bin/python3")
        .args(["-c", "import nbd"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success());
    if !there {
        println!("SKIPPED {test}: /usr/bin/python3 has no module nbd (python3-libnbd)");
    }
    there
}

/// Runs a program to its end without input.
pub fn run(program: &str, args: &[&str], dir: &Path) -> anyhow::Result<Output> {
    Command::new(program)
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| anyhow::anyhow!("cannot run {program}: {e}"))
}

/// Runs a program that must succeed; its standard output.
pub fn run_ok(program: &str, args: &[&str], dir: &Path) -> anyhow::Result<String> {
    let out = run(program, args, dir)?;
    let (stdout, stderr) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    anyhow::ensure!(
        out.status.success(),
        "{program} {}: {}\n{stdout}{stderr}",
        args.join(" "),
        out.status
    );
    Ok(stdout.into_owned())
}

/// Runs Python code with libnbd; what it prints.
pub fn python_nbd(code: &str, dir: &Path) -> anyhow::Result<String> {
    run_ok("/usr/bin/python3", &["-c", code], dir)
}
