//! One `qemu-io` that stays connected and is given one command after another: what a guest's QEMU notices of
//! a daemon that restarts or is replaced.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::wait;

/// What has to be installed for one.
pub const PROGRAMS: [&str; 2] = ["qemu-io", "stdbuf"];

/// A running one. It is killed when this is dropped, and asked to end by [`end`](QemuIo::end).
pub struct QemuIo {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    limit: Duration,
}

impl QemuIo {
    /// Starts one on a block node (`driver=nbd,…`); nothing it is asked may take longer than `limit`.
    pub fn start(node: &str, limit: Duration) -> Result<QemuIo> {
        // Line by line: it keeps back what it says into a pipe.
        let mut child = Command::new("stdbuf")
            .args(["-oL", "qemu-io", "--image-opts", node])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("no stdout")?);
        let (to_us, lines) = channel();
        std::thread::spawn(move || {
            output
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| to_us.send(line))
        });
        Ok(QemuIo {
            child,
            input,
            lines,
            limit,
        })
    }

    /// Gives it a command. Of two lines that arrive together it leaves the second lying: the answer to one comes
    /// before the next.
    pub fn say(&mut self, command: &str) -> Result<()> {
        writeln!(self.input.as_mut().context("it was ended")?, "{command}")?;
        Ok(())
    }

    /// Reads what it says until the line that has `wanted`; an error if it says that anything failed.
    pub fn answer(&self, wanted: &str) -> Result<()> {
        loop {
            let line = self
                .lines
                .recv_timeout(self.limit)
                .with_context(|| format!("qemu-io did not say \"{wanted}\""))?;
            ensure!(!line.contains("failed"), "qemu-io: {line}");
            if line.contains(wanted) {
                return Ok(());
            }
        }
    }

    /// A command and its answer.
    pub fn ask(&mut self, command: &str, wanted: &str) -> Result<()> {
        self.say(command)?;
        self.answer(wanted)
    }

    /// Ends it, which must go well.
    pub fn end(mut self) -> Result<()> {
        drop(self.input.take());
        let status = wait::until("qemu-io ends", self.limit, || {
            self.child.try_wait().ok().flatten()
        })?;
        ensure!(status.success(), "qemu-io failed");
        Ok(())
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
