//! The control API without the command line: for tests that ask it thousands of times.

use crate::wait;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// Longest an answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Longest a removal may take.
const REMOVE_LIMIT: Duration = Duration::from_secs(60);

/// Where a daemon's control API is.
#[derive(Clone, Debug)]
pub struct Api(PathBuf);

impl Api {
    /// The API on a socket.
    pub fn at(socket: PathBuf) -> Api {
        Api(socket)
    }

    /// Asks, on a connection of its own; the status and the body of the answer.
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        let (status, body) = self.exchange(method, path, body)?;
        let body = serde_json::from_str(&body)
            .with_context(|| format!("{method} {path}: {status}, no JSON: {body}"))?;
        Ok((status, body))
    }

    fn exchange(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, String)> {
        let mut stream = UnixStream::connect(&self.0)
            .with_context(|| format!("connect to {}", self.0.display()))?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let typed = if body.is_empty() {
            ""
        } else {
            "Content-Type: application/json\r\n"
        };
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: hearth\r\nConnection: close\r\n{typed}Content-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8(answer)?;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .with_context(|| format!("{method} {path}: no whole answer: {answer}"))?;
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
        let status = status.with_context(|| format!("{method} {path}: no status: {head}"))?;
        Ok((status, body.to_owned()))
    }

    /// What is there, as it is written: metrics are no JSON.
    pub fn text(&self, path: &str) -> Result<String> {
        let (status, body) = self.exchange("GET", path, None)?;
        ensure!(status == 200, "GET {path}: {status} {body}");
        Ok(body)
    }

    /// Asks for something that must be there.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.good("GET", path, None)
    }

    fn good(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let (status, answer) = self.ask(method, path, body)?;
        ensure!(status == 200, "{method} {path}: {status} {answer}");
        Ok(answer)
    }

    /// Adds a disk.
    pub fn add(&self, name: &str, origin: &str) -> Result<Value> {
        let disk = json!({"name": name, "origin": origin});
        self.good("POST", "/v1/disks", Some(&disk))
    }

    /// Removes a disk, and waits until it is gone.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = format!("/v1/disks/{name}");
        self.good("POST", &format!("{path}/remove"), Some(&json!({})))?;
        wait::until(&format!("{name} is removed"), REMOVE_LIMIT, || {
            match self.ask("GET", &path, None) {
                Ok((404, _)) => Some(Ok(())),
                Ok(_) => None,
                Err(e) => Some(Err(e)),
            }
        })?
    }

    /// All disks: their names and what they are doing.
    pub fn disks(&self) -> Result<Vec<(String, String)>> {
        let all = self.get("/v1/disks")?;
        let all = all.as_array().context("no list of disks")?;
        let word = |disk: &Value, field: &str| disk[field].as_str().map(str::to_owned);
        all.iter()
            .map(|disk| Some((word(disk, "name")?, word(disk, "state")?)))
            .collect::<Option<Vec<_>>>()
            .context("a disk without a name or a state")
    }
}
