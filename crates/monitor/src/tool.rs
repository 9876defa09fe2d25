//! Programs that tell something, run within limits: of time, because a tool that asks a dying drive may never
//! come back, and of what they say.

use std::io::{self, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Most bytes that are read of what a program says.
const OUTPUT_MAX: u64 = 8 << 20;
/// How often it is looked whether it has ended.
const POLL: Duration = Duration::from_millis(20);

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
}
