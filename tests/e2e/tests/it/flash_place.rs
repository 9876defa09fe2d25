//! Where a new pool may lie, as the command line says it. What needs a mount of its own needs root,
//! and says so without.

use anyhow::{Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

/// Runs a script of `sh` with mounts of its own; `None` if this user may not.
fn with_mounts(script: &str, args: &[&str]) -> Result<Option<Output>> {
    // SAFETY: geteuid has no preconditions and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: mounts of its own need root");
        return Ok(None);
    }
    let out = Command::new("unshare")
        .args(["--mount", "sh", "-ec", script, "sh"])
        .args(args)
        .output()?;
    Ok(Some(out))
}

fn words(out: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    )
}

#[test]
fn the_first_command_of_the_readme_works_on_a_fresh_host() -> Result<()> {
    let hearth = Hearth::bare()?;
    let var = hearth.dir().join("var");
    std::fs::create_dir(&var)?;
    let bin = hearth_rig::daemon::binary()?;
    let script = "mount --bind \"$2\" /var/lib; \
                  exec \"$1\" pool create --flash /var/lib/hearth/flash --size 64M";
    let Some(out) = with_mounts(script, &[path(&bin), path(&var)])? else {
        return Ok(());
    };
    let said = words(&out);
    ensure!(out.status.success(), "{said}");
    ensure!(
        said.contains("made the directory /var/lib/hearth"),
        "{said}"
    );
    let mode = std::fs::metadata(var.join("hearth"))?.permissions().mode();
    ensure!(mode & 0o777 == 0o700, "{mode:o}");
    ensure!(var.join("hearth/flash").is_file());
    Ok(())
}

#[test]
fn flash_in_ram_is_refused_without_force() -> Result<()> {
    let hearth = Hearth::bare()?;
    let ram = hearth.dir().join("flash-ram");
    std::fs::create_dir(&ram)?;
    let bin = hearth_rig::daemon::binary()?;
    let script = "mount -t tmpfs -o size=128M tmpfs \"$2\"; \
                  \"$1\" pool create --flash \"$2/f\" --size 64M && exit 7; \
                  test ! -e \"$2/f\"; \
                  \"$1\" pool create --flash \"$2/f\" --size 1G --force && exit 8; \
                  test ! -e \"$2/f\"; \
                  exec \"$1\" pool create --flash \"$2/f\" --size 64M --force";
    let Some(out) = with_mounts(script, &[path(&bin), path(&ram)])? else {
        return Ok(());
    };
    let said = words(&out);
    ensure!(out.status.success(), "{said}");
    for part in ["would be in RAM", "has room for", "is in RAM"] {
        ensure!(said.contains(part), "no word of {part}: {said}");
    }
    Ok(())
}

#[test]
fn nothing_is_made_below_dev() -> Result<()> {
    let hearth = Hearth::bare()?;
    let name = "/dev/hearth-flash-mistyped";
    for more in [&[][..], &["--size", "64M"], &["--size", "64M", "--force"]] {
        let args = [&["pool", "create", "--flash", name], more].concat();
        let said = hearth.refused(&args)?;
        ensure!(said.contains("there is no device"), "{said}");
        ensure!(!said.contains("add --size"), "{said}");
        ensure!(!std::path::Path::new(name).exists());
    }
    Ok(())
}

#[test]
fn a_sparse_file_is_warned_of_and_a_live_pool_is_not_overwritten() -> Result<()> {
    let mut hearth = Hearth::bare()?;
    std::fs::File::create(hearth.flash())?.set_len(64 << 20)?;
    let flash = hearth.flash().to_owned();
    let said = hearth.said(&["pool", "create", "--flash", path(&flash)])?;
    ensure!(said.contains("is sparse"), "{said}");
    hearth.start()?;
    hearth.logged("is sparse")?;
    ensure!(hearth.ok(&["pool", "show"])?.contains("is sparse"));
    for more in [&["--force"][..], &["--force", "--size", "64M"]] {
        let args = [&["pool", "create", "--flash", path(&flash)], more].concat();
        let said = hearth.refused(&args)?;
        ensure!(said.contains("in use"), "{said}");
    }
    hearth.ok(&["pool", "show"])?;
    hearth.stop()?;
    Ok(())
}
