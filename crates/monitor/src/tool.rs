//! Programs that tell something, run within limits: of time, because a tool that asks a dying drive may never
//! come back, and of what they say.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hearth_io::until::{Until, connect_unix};

/// Most bytes that are read of what a program says.
const OUTPUT_MAX: u64 = 8 << 20;
/// How often it is looked whether it has ended.
const POLL: Duration = Duration::from_millis(20);

/// Where whoever has the rights answers for us: `packaging/probe`, started by the service manager for each question.
const PROBE: &str = "/run/hearth-probe.sock";
/// What its last line begins with.
const ENDED: &[u8] = b"\nhearth-probe: ";

/// What a program said, and how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Its standard output.
    pub output: Vec<u8>,
    /// Its exit status.
    pub status: i32,
}

/// Why it said nothing.
#[derive(Debug)]
pub enum Mute {
    /// It is not installed.
    Missing,
    /// It did not end in time, and was killed.
    Late,
    /// It could not be run.
    Io(io::Error),
}

/// Runs a program.
pub fn ask(program: &str, args: &[&str], limit: Duration) -> Result<Said, Mute> {
    let mut child = Command::new(program)
        .args(args)
        // Tools are often where only root's path leads.
        .env("PATH", path())
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Mute::Missing,
            _ => Mute::Io(e),
        })?;
    let pipe = child.stdout.take();
    // Ends when the pipe does: with the program, and whatever it has started.
    let reading = std::thread::spawn(move || {
        let mut output = Vec::new();
        let read = pipe.map(|pipe| pipe.take(OUTPUT_MAX).read_to_end(&mut output));
        read.transpose().map(|_| output)
    });
    let end = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(Mute::Io)? {
            Some(status) => break status,
            None if Instant::now() >= end => {
                kill(child);
                return Err(Mute::Late);
            }
            None => std::thread::sleep(POLL),
        }
    };
    let output = match reading.join() {
        Ok(read) => read.map_err(Mute::Io)?,
        Err(_) => Vec::new(),
    };
    Ok(Said {
        output,
        // One that a signal ended told nothing.
        status: status.code().unwrap_or(-1),
    })
}

/// The same of what only root is told: through who answers for us, if somebody does, else as it is.
pub fn ask_as_root(
    question: &str,
    program: &str,
    args: &[&str],
    limit: Duration,
) -> Result<Said, Mute> {
    match connect_unix(Path::new(PROBE), limit) {
        Ok(probe) => through(probe, question, limit),
        Err(_) => ask(program, args, limit),
    }
}

fn through(probe: UnixStream, question: &str, limit: Duration) -> Result<Said, Mute> {
    let mute = |e: io::Error| match e.kind() {
        ErrorKind::TimedOut => Mute::Late,
        _ => Mute::Io(e),
    };
    let mut probe = Until::new(probe, Instant::now() + limit);
    probe
        .write_all(format!("{question}\n").as_bytes())
        .map_err(mute)?;
    probe.get_ref().shutdown(Shutdown::Write).map_err(mute)?;
    let mut output = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        match probe.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => output.extend_from_slice(&piece[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(mute(e)),
        }
        if output.len() as u64 > OUTPUT_MAX {
            return Err(Mute::Io(io::Error::other("it says too much")));
        }
    }
    let cut_short = || Mute::Io(io::Error::new(ErrorKind::UnexpectedEof, "it was cut short"));
    let at = output.windows(ENDED.len()).rposition(|w| w == ENDED);
    let at = at.ok_or_else(cut_short)?;
    let word = String::from_utf8_lossy(&output[at + ENDED.len()..]).into_owned();
    output.truncate(at);
    match word.trim() {
        "missing" => Err(Mute::Missing),
        status => Ok(Said {
            status: status.parse().map_err(|_| cut_short())?,
            output,
        }),
    }
}

fn path() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// One that hangs in the kernel does not go even so; a thread waits for it in our place.
fn kill(mut child: Child) {
    let _ = child.kill();
    std::thread::spawn(move || child.wait());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_says_how_it_ends_and_what_takes_too_long() {
        let long = Duration::from_secs(60);
        let said = ask("sh", &["-c", "echo x; exit 9"], long).unwrap();
        assert_eq!((said.output.as_slice(), said.status), (&b"x\n"[..], 9));
        assert!(matches!(
            ask("no-such-program", &[], long),
            Err(Mute::Missing)
        ));
        let late = ask("sleep", &["600"], Duration::from_millis(50));
        assert!(matches!(late, Err(Mute::Late)));
    }

    /// Asks the program that the package installs, with these tools before all others.
    fn probed(question: &str, tools: &std::path::Path) -> Result<Said, Mute> {
        use std::os::fd::OwnedFd;
        let (ours, theirs) = UnixStream::pair().unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/probe");
        let mut path = std::ffi::OsString::from(tools);
        path.push(":/usr/bin:/bin");
        let mut child = Command::new("sh")
            .arg(script)
            .env("PATH", path)
            .stdin(OwnedFd::from(theirs.try_clone().unwrap()))
            .stdout(OwnedFd::from(theirs))
            .spawn()
            .unwrap();
        let said = through(ours, question, Duration::from_secs(60));
        child.wait().unwrap();
        said
    }

    #[test]
    fn who_answers_for_us_answers_what_is_listed_and_nothing_else() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let tool = dir.path().join("lvs");
        let script = "#!/bin/sh\necho \"$@\"; echo 'hearth-probe: 0'; exit 5\n";
        std::fs::write(&tool, script).unwrap();
        std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
        let said = probed("lvs", dir.path()).unwrap();
        let wanted = format!(
            "--reportformat json -a -o {}\nhearth-probe: 0\n",
            hearth_health::lvm::FIELDS
        );
        assert_eq!(String::from_utf8(said.output).unwrap(), wanted);
        assert_eq!(said.status, 5);
        // A type of smartctl's option -d may be said, and nothing that is more.
        std::fs::rename(&tool, dir.path().join("smartctl")).unwrap();
        let said = |question: &str| probed(question, dir.path()).map(|said| said.output);
        let scanned = String::from_utf8(said("smart-scan").unwrap()).unwrap();
        assert!(scanned.starts_with("--scan --json=c\n"), "{scanned}");
        let blocks = std::fs::read_dir("/sys/class/block").unwrap().flatten();
        let names = blocks.filter_map(|b| b.file_name().into_string().ok());
        let mut names = names.filter(|n| std::path::Path::new("/dev").join(n).exists());
        if let Some(name) = names.next() {
            let typed = said(&format!("smart {name} sat+megaraid,5")).unwrap();
            let wanted = format!("--json=c -a -n standby -d sat+megaraid,5 /dev/{name}\n");
            assert!(String::from_utf8(typed).unwrap().starts_with(&wanted));
            for kind in ["sat -l error", "a;b", "$(id)", ""] {
                let refused = said(&format!("smart {name} {kind}"));
                assert!(matches!(refused, Err(Mute::Io(_))), "{kind}: {refused:?}");
            }
        }
        let missing = probed("zpool", dir.path());
        assert!(matches!(missing, Err(Mute::Missing)), "{missing:?}");
        for question in ["smart ../../etc/shadow", "smart null", "lvs -h", "", "sh"] {
            let said = probed(question, dir.path());
            assert!(matches!(said, Err(Mute::Io(_))), "{question}: {said:?}");
        }
    }

    #[test]
    fn who_hangs_instead_of_answering_is_left() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let said = through(ours, "lvs", Duration::from_millis(50));
        assert!(matches!(said, Err(Mute::Late)), "{said:?}");
    }
}
