//! Swap that nobody can read later: dm-crypt with a key that is made when it is taken into use, and known to nobody.
//!
//! What programs have in their memory stays on flash for as long as nothing is written over it. With a key that is gone with the
//! next boot there is nothing to be read. That is `cryptsetup`'s plain mode with `/dev/urandom` as the key, as distributions do it in
//! `crypttab(5)`; the swap is made anew each time. Not every kernel has dm-crypt, and where it has not, that is found out before
//! anything is changed.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use hearth_fault::Fault;
use uuid::Uuid;

use crate::Result;

/// AES with two keys of 256 bits.
const CIPHER: [&str; 4] = ["--cipher", "aes-xts-plain64", "--key-size", "512"];

/// Runs a program of the system.
type Run<'a> = &'a dyn Fn(&str, &[&str]) -> io::Result<Output>;

fn run(program: &str, args: &[&str]) -> io::Result<Output> {
    Command::new(program).args(args).output()
}

/// Refuses where swap cannot be encrypted. Nothing is changed.
pub fn available() -> Result<()> {
    available_by(&run)
}

fn available_by(run: Run<'_>) -> Result<()> {
    const LEAVE_OUT: &str =
        "leave --encrypt out, or use a kernel with dm-crypt, with the package cryptsetup";
    // Where it is a module nobody has loaded it yet; built in it need not be.
    let _ = run("modprobe", &["--quiet", "dm-crypt"]);
    let targets = run("dmsetup", &["targets"]);
    let crypt = targets.is_ok_and(|out| {
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        out.status.success()
            && text
                .lines()
                .any(|l| l.split_whitespace().next() == Some("crypt"))
    });
    if !crypt {
        return Err(Fault::new(
            "this kernel has no dm-crypt, so swap cannot be encrypted here",
            LEAVE_OUT,
        ));
    }
    match run("cryptsetup", &["--version"]) {
        Ok(out) if out.status.success() => Ok(()),
        _ => Err(Fault::new(
            "there is no cryptsetup, so swap cannot be encrypted here",
            LEAVE_OUT,
        )),
    }
}

/// What the encrypted device of an area is called.
fn name(uuid: Uuid) -> String {
    format!("hearth-swap-{uuid}")
}

fn mapped(uuid: Uuid) -> PathBuf {
    Path::new("/dev/mapper").join(name(uuid))
}

/// What `cryptsetup` is told to show `node` under `name`, with a key of this moment.
fn open_args(node: &str, name: &str) -> Vec<String> {
    let mut args = vec!["open", "--batch-mode", "--type", "plain"];
    args.extend(CIPHER);
    args.extend(["--key-file", "/dev/urandom", node, name]);
    args.into_iter().map(str::to_owned).collect()
}

/// The device that encrypts what is written to `node`.
pub(crate) fn open(node: &Path, uuid: Uuid) -> Result<PathBuf> {
    let args = open_args(&node.display().to_string(), &name(uuid));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    told(run("cryptsetup", &args), || {
        format!("cannot encrypt {}", node.display())
    })?;
    Ok(mapped(uuid))
}

/// Takes it away, and with it the key.
pub(crate) fn close(uuid: Uuid) -> Result<()> {
    if !mapped(uuid).exists() {
        return Ok(());
    }
    told(run("cryptsetup", &["close", &name(uuid)]), || {
        format!("cannot take {} away", mapped(uuid).display())
    })
}

fn told(out: io::Result<Output>, what: impl Fn() -> String) -> Result<()> {
    let why = match out {
        Ok(out) if out.status.success() => return Ok(()),
        Ok(out) => String::from_utf8_lossy(&out.stderr).trim().to_owned(),
        Err(e) => e.to_string(),
    };
    Err(Fault::new(
        format!("{}: {why}", what()),
        "look at what the kernel says (dmesg); without --encrypt it needs no cryptsetup",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    fn said(text: &str) -> io::Result<Output> {
        Ok(Output {
            status: ExitStatus::from_raw(0),
            stdout: text.into(),
            stderr: Vec::new(),
        })
    }

    #[test]
    fn the_key_is_nobodys_and_of_this_moment() {
        let args = open_args("/dev/loop7", "hearth-swap-1").join(" ");
        assert_eq!(
            args,
            "open --batch-mode --type plain --cipher aes-xts-plain64 --key-size 512 --key-file /dev/urandom /dev/loop7 hearth-swap-1"
        );
        let uuid = Uuid::from_u128(1);
        let path = "/dev/mapper/hearth-swap-00000000-0000-0000-0000-000000000001";
        assert_eq!(mapped(uuid), Path::new(path));
        // There is nothing to be taken away.
        assert_eq!(close(uuid), Ok(()));
    }

    /// What `available` and `open` use has to be there under the unit that takes swap up after a
    /// boot.
    #[test]
    fn packaged_unit_allows_encryption() {
        let unit = include_str!("../../../packaging/systemd/hearth-swap.service");
        let says = |line: &str| assert!(unit.lines().any(|l| l == line), "no {line}");
        says("DevicePolicy=closed");
        says("DeviceAllow=/dev/mapper/control rw");
        says("ProtectKernelModules=yes");
        says("Wants=modprobe@dm_crypt.service");
        let after = unit.lines().find_map(|l| l.strip_prefix("After="));
        assert!(
            after.is_some_and(|all| all.split(' ').any(|one| one == "modprobe@dm_crypt.service"))
        );
    }

    #[test]
    fn it_is_refused_where_something_is_missing_for_it() {
        let none = || Err(io::ErrorKind::NotFound.into());
        let with = |targets: &'static str, cryptsetup: bool| {
            available_by(&move |program: &str, _: &[&str]| match program {
                "dmsetup" => said(targets),
                "cryptsetup" if cryptsetup => said("cryptsetup 2.6.1"),
                _ => none(),
            })
        };
        assert_eq!(with("striped  v1.6.0\ncrypt    v1.28.0\n", true), Ok(()));
        let e = with("striped  v1.6.0\nencrypt  v1.0.0\n", true).unwrap_err();
        assert!(
            e.what.contains("no dm-crypt") && !e.remedy.is_empty(),
            "{e}"
        );
        let e = with("crypt v1.28.0\n", false).unwrap_err();
        assert!(e.what.contains("no cryptsetup"), "{e}");
        let e = available_by(&|_: &str, _: &[&str]| none()).unwrap_err();
        assert!(e.what.contains("no dm-crypt"), "{e}");
    }
}
