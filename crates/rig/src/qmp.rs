//! QEMU's control protocol, as far as tests need it: one command at a time, events skipped.

use crate::machine::GUEST_LIMIT;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

/// A connection to a QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Greets on a fresh connection.
    pub fn new(stream: UnixStream) -> Result<Qmp> {
        stream.set_read_timeout(Some(GUEST_LIMIT))?;
        stream.set_write_timeout(Some(GUEST_LIMIT))?;
        let mut qmp = Qmp {
            stream: BufReader::new(stream),
        };
        let greeting = qmp.line()?;
        ensure!(greeting.get("QMP").is_some(), "no greeting: {greeting}");
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command; what it returns.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let message = json!({"execute": command, "arguments": arguments});
        writeln!(self.stream.get_mut(), "{message}")?;
        loop {
            let mut answer = self.line().with_context(|| command.to_owned())?;
            if answer.get("error").is_some() {
                bail!("{command}: {}", answer["error"]);
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Whether the machine runs: `running`, `paused`, `io-error`, ...
    pub fn status(&mut self) -> Result<String> {
        let answer = self.execute("query-status", json!({}))?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        ensure!(self.stream.read_line(&mut line)? > 0, "QEMU ended");
        serde_json::from_str(&line).with_context(|| line)
    }
}
