//! Other people's NBD servers as origins: started, killed, stopped in the middle, started again.

use crate::wait;
use anyhow::{Context, Result, ensure};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest a server may take to listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// A server on a unix socket. Killed when dropped.
#[derive(Debug)]
pub struct Server {
    program: String,
    args: Vec<String>,
    socket: PathBuf,
    child: Option<Child>,
}

impl Server {
    /// A server with these arguments, of which `{socket}` stands for the socket's path. Started.
    pub fn start(program: &str, args: &[&str], socket: PathBuf) -> Result<Server> {
        let args = args
            .iter()
            .map(|a| a.replace("{socket}", &socket.display().to_string()))
            .collect();
        let mut server = Server {
            program: program.to_owned(),
            args,
            socket,
            child: None,
        };
        server.up()?;
        Ok(server)
    }

    /// Starts it (again) and waits until it answers.
    pub fn up(&mut self) -> Result<()> {
        // A killed server leaves its socket.
        let _ = std::fs::remove_file(&self.socket);
        let child = Command::new(&self.program)
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {}", self.program))?;
        self.child = Some(child);
        wait::until("the server listens", START_LIMIT, || {
            greets(&self.socket).then_some(())
        })
    }

    /// Its process.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// kill -9.
    pub fn kill9(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Ends it in order.
    pub fn stop(&mut self) -> Result<()> {
        self.signal(libc::SIGTERM)?;
        if let Some(mut child) = self.child.take() {
            child.wait()?;
        }
        Ok(())
    }

    /// Sends a signal, such as `SIGSTOP`: a server that hangs.
    pub fn signal(&self, signal: i32) -> Result<()> {
        let pid = self.pid().context("the server is not running")?;
        // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
        let sent = unsafe { libc::kill(pid as i32, signal) };
        ensure!(sent == 0, "kill({pid})");
        Ok(())
    }

    /// Where a client finds an export of it.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.kill9();
    }
}

fn greets(socket: &Path) -> bool {
    let mut greeting = [0u8; 8];
    UnixStream::connect(socket).is_ok_and(|mut stream| {
        stream
            .set_read_timeout(Some(Duration::from_secs(1)))
            .is_ok()
            && stream.read_exact(&mut greeting).is_ok()
    })
}
