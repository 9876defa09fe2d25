//! Asks the next program whether it could take over, before anything is given up for it.
//!
//! It is run once, as a command of its own, with the arguments of the daemon, and looks: are these arguments and
//! settings good, can it read the pool, which documents does it understand? What it says is judged here. A program
//! that is no Hearth, is too old to be asked, or does not answer in time cannot take over.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{VARIABLE, VERSION, document};
use crate::api::types::ErrorBody;
use crate::error::{Error, Result};

/// The command, which nobody types.
pub const COMMAND: &str = "can-take-over";
/// Longest it may take. It opens nothing that could hang but the flash, which is being served from.
const LIMIT: Duration = Duration::from_secs(20);
/// How often is looked whether it has ended: nothing else tells, within a limit.
const POLL: Duration = Duration::from_millis(5);
/// Most of what it says that is read.
const TEXT_MAX: u64 = 16 << 10;
/// `CLOSE_RANGE_CLOEXEC`.
const CLOSE_ON_EXEC: libc::c_uint = 4;

/// What a program says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Its version.
    pub version: String,
    /// Versions of the [document] it reads.
    pub documents: Vec<u16>,
    /// Versions of a connection's state over NBD it reads.
    pub nbd: Vec<u16>,
    /// Why it could not serve; `None` if it could.
    pub refusal: Option<ErrorBody>,
}

impl Answer {
    /// This program's.
    pub fn own(could_serve: Result<()>) -> Answer {
        Answer {
            version: VERSION.to_owned(),
            documents: vec![document::VERSION],
            nbd: vec![hearth_nbd::carried::VERSION],
            refusal: could_serve.err().map(ErrorBody::from),
        }
    }

    /// Could it take over from this program?
    fn judge(self, program: &Path) -> Result<Answer> {
        let shown = program.display();
        if let Some(why) = self.refusal {
            return Err(Error::refused(
                format!(
                    "{shown} ({}) could not serve this pool: {}",
                    self.version, why.error
                ),
                why.remedy,
            ));
        }
        let reads = self.documents.contains(&document::VERSION)
            && self.nbd.contains(&hearth_nbd::carried::VERSION);
        if !reads {
            return Err(Error::refused(
                format!(
                    "{shown} ({}) does not understand what this version ({VERSION}) would leave for it",
                    self.version
                ),
                "stop the daemon and start that program, when guests can stand it",
            ));
        }
        Ok(self)
    }
}

/// Asks `program`, which would be started with `args`.
pub fn ask(program: &Path, args: &[OsString]) -> Result<Answer> {
    let shown = program.display();
    let no_answer = |why: &str| {
        Error::refused(
            format!("{shown} cannot take over: {why}"),
            "name a Hearth that is no older than the one that runs",
        )
    };
    let mut command = Command::new(program);
    command
        .args([COMMAND, "--"])
        .args(args)
        .env_remove(VARIABLE)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // It is to have nothing of ours. Where the kernel is too old for it, what is ours is closed on exec anyway.
    let close = || {
        // SAFETY: plain numbers; it changes flags of the child's descriptors only.
        unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, CLOSE_ON_EXEC) };
        Ok(())
    };
    // SAFETY: a system call, which may be made between fork and exec.
    unsafe { command.pre_exec(close) };
    let mut child = command
        .spawn()
        .map_err(|e| no_answer(&format!("it cannot be run ({e})")))?;
    let ended = ended(&child);
    // And whatever it has started, which would keep its output open. Its number is its own until it is waited for.
    // SAFETY: plain numbers.
    unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
    // It ends, or it has ended.
    let _ = child.wait();
    let mut text = String::new();
    if let Some(stdout) = child.stdout.take() {
        // Not all of it may be text.
        let _ = stdout.take(TEXT_MAX).read_to_string(&mut text);
    }
    match ended {
        false => Err(no_answer(&format!(
            "it did not answer within {} s",
            LIMIT.as_secs()
        ))),
        true => match serde_json::from_str::<Answer>(&text) {
            Ok(answer) => answer.judge(program),
            Err(_) => Err(no_answer(
                "it is no Hearth, or one that is too old to be asked",
            )),
        },
    }
}

/// Waits until it has ended, and leaves it to be waited for; false if that takes too long.
fn ended(child: &Child) -> bool {
    let end = Instant::now() + LIMIT;
    let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    loop {
        // SAFETY: zeroes are a value of it.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a valid pointer to a structure of ours, which the call fills.
        let told = unsafe { libc::waitid(libc::P_PID, child.id(), &mut info, how) };
        // SAFETY: the call fills this part, or leaves its zeroes.
        if told == 0 && unsafe { info.si_pid() } != 0 {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn says(words: &str) -> Result<Answer> {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("hearth");
        std::fs::write(&program, format!("#!/bin/sh\ncat <<'END'\n{words}\nEND\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        // Another thread of the tests may be between fork and exec, with the file open for writing.
        for _ in 0..100 {
            match ask(&program, &[]) {
                Err(e) if e.what.contains("busy") => std::thread::yield_now(),
                other => return other,
            }
        }
        ask(&program, &[])
    }

    #[test]
    fn a_program_is_believed_only_what_fits() {
        let answer = |documents: &str, refusal: &str| {
            says(&format!(
                r#"{{"version":"9.0","documents":{documents},"nbd":[1],"refusal":{refusal}}}"#
            ))
        };
        assert_eq!(answer("[1,2]", "null").unwrap().version, "9.0");
        let older = answer("[2]", "null").unwrap_err();
        assert!(older.what.contains("does not understand"), "{older}");
        let refused = answer(
            "[1]",
            r#"{"error":"no such option","remedy":"take it out"}"#,
        );
        let refused = refused.unwrap_err();
        assert!(refused.what.contains("no such option"), "{refused}");
        assert_eq!(refused.remedy, "take it out");
        for garbage in ["", "hello", "{}", "[1]"] {
            let e = says(garbage).unwrap_err();
            assert!(e.what.contains("no Hearth"), "{e}");
        }
        assert!(ask(Path::new("/no/such/program"), &[]).is_err());
        // What it leaves running has its output open, and keeps nobody waiting.
        let begin = Instant::now();
        let left = says("END\nsleep 1000 &\ncat <<'END'");
        assert!(left.unwrap_err().what.contains("no Hearth"));
        assert!(begin.elapsed() < Duration::from_secs(500));
    }
}
