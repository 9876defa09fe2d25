//! Tests that run once more in a mount namespace of their own, so that file systems they mount are private.

use anyhow::{Result, ensure};
use std::process::Command;

/// Set in the second run.
const INSIDE: &str = "HEARTH_TEST_INSIDE";

/// True in the second run of the test with this path. Otherwise runs `first`, a shell command, and then the test in a
/// mount namespace of its own, checks that it passed, and returns false. Prints that the test is skipped where this
/// user may not mount.
pub fn is_in_own_mounts(test: &str, first: &str) -> Result<bool> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(true);
    }
    let own = std::env::current_exe()?;
    let script = format!(
        "{first} && exec {} --exact {test} --nocapture",
        own.display()
    );
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .env(INSIDE, "1")
        .output()?;
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed);
    if printed.contains("Operation not permitted") {
        eprintln!("{test}: skipped: this user may not mount a file system");
        return Ok(false);
    }
    let passed = output.status.success() && printed.contains("1 passed");
    ensure!(passed, "{printed}");
    Ok(false)
}
