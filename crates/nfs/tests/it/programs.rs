//! Programs of other people, as clients.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};

/// Runs one to its end, which must be a good one.
pub fn run(program: &str, args: &[&str]) -> Result<Output> {
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program} {args:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output)
}

/// False, and a line that says so, if one is missing.
pub fn have(test: &str, programs: &[&str]) -> bool {
    let missing = |p: &&&str| {
        !std::env::var("PATH")
            .is_ok_and(|all| all.split(':').any(|d| Path::new(d).join(**p).exists()))
    };
    match programs.iter().find(missing) {
        Some(missing) => {
            eprintln!("{test}: skipped: no {missing}; scripts/setup.sh test installs it");
            false
        }
        None => true,
    }
}
