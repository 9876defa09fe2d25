//! A program's answer, within a limit.

use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Most that is read of an answer.
const ANSWER_MAX: u64 = 1 << 20;
/// Between two looks whether it has ended.
const LOOK: Duration = Duration::from_millis(2);

/// Runs a program; what it printed. An error if it fails, is killed for being late, or is not there.
pub fn ask(program: &str, args: &[&str], limit: Duration) -> io::Result<String> {
    let mut child = Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let read = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(stream) = stream {
                // What could be read is the answer.
                let _ = stream.take(ANSWER_MAX).read_to_end(&mut text);
            }
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let out = read(child.stdout.take().map(|s| Box::new(s) as _));
    let err = read(child.stderr.take().map(|s| Box::new(s) as _));
    let end = Instant::now() + limit;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() >= end => {
                child.kill()?;
                child.wait()?;
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{program} has not answered within {} s", limit.as_secs()),
                ));
            }
            None => std::thread::sleep(LOOK),
        }
    };
    let text = |thread: std::thread::JoinHandle<String>| thread.join().unwrap_or_default();
    let (out, err) = (text(out), text(err));
    if status.success() {
        return Ok(out);
    }
    let first = err.lines().next().unwrap_or("it does not say why").trim();
    Err(io::Error::other(format!("{program}: {first}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_failures_and_silence() {
        let limit = Duration::from_secs(60);
        assert_eq!(ask("sh", &["-c", "echo a"], limit).unwrap(), "a\n");
        let failed = ask("sh", &["-c", "echo why >&2; exit 1"], limit).unwrap_err();
        assert!(failed.to_string().contains("why"));
        let late = ask("sleep", &["600"], Duration::from_millis(1)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let none = ask("/no/such/program", &[], limit).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotFound);
    }
}
