//! Other people's NBD servers as origins: started, killed, stopped in the middle, started again.

use crate::wait;
use anyhow::{Context, Result, ensure};
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longest a server may take to listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Where a server listens, always the same place.
#[derive(Debug)]
enum At {
    Unix(PathBuf),
    /// A port of this host's own address.
    Tcp(u16),
}

/// A server on a unix socket or a port of this host. Killed when dropped.
#[derive(Debug)]
pub struct Server {
    program: String,
    args: Vec<String>,
    at: At,
    child: Option<Child>,
}

impl Server {
    /// A server with these arguments, of which `{socket}` stands for the socket's path. Started.
    pub fn start(program: &str, args: &[&str], socket: PathBuf) -> Result<Server> {
        let place = socket.display().to_string();
        Server::started(program, args, ("{socket}", &place), At::Unix(socket))
    }

    /// qemu-nbd, for this file as the export `name`, until it is killed.
    pub fn qemu_nbd(file: &Path, name: &str, socket: PathBuf) -> Result<Server> {
        let file = file.to_str().context("a path in UTF-8")?;
        let lasting = ["--socket={socket}", "--persistent", "--shared=8"];
        let args = [&lasting[..], &["-f", "raw", "-x", name, file]].concat();
        Server::start("qemu-nbd", &args, socket)
    }

    /// One over TCP: `{port}` stands for a port nobody uses. The address is 127.0.0.1.
    pub fn start_tcp(program: &str, args: &[&str]) -> Result<Server> {
        let port = free_port()?;
        Server::started(program, args, ("{port}", &port.to_string()), At::Tcp(port))
    }

    fn started(program: &str, args: &[&str], place: (&str, &str), at: At) -> Result<Server> {
        let mut server = Server {
            program: program.to_owned(),
            args: args.iter().map(|a| a.replace(place.0, place.1)).collect(),
            at,
            child: None,
        };
        server.up()?;
        Ok(server)
    }

    /// Starts it (again) and waits until it answers.
    pub fn up(&mut self) -> Result<()> {
        if let At::Unix(socket) = &self.at {
            // A killed server leaves its socket.
            let _ = std::fs::remove_file(socket);
        }
        let child = Command::new(&self.program)
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {}", self.program))?;
        self.child = Some(child);
        wait::until("the server listens", START_LIMIT, || {
            self.at.greets().then_some(())
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
        match &self.at {
            At::Unix(socket) => format!("nbd+unix:///{export}?socket={}", socket.display()),
            At::Tcp(port) => format!("nbd://127.0.0.1:{port}/{export}"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.kill9();
    }
}

/// A port of this host nobody listens on. Somebody else may take it before it is used; the kernel
/// hands out others first.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

impl At {
    /// True if an NBD server answers.
    fn greets(&self) -> bool {
        let limit = Some(Duration::from_secs(1));
        match self {
            At::Unix(socket) => UnixStream::connect(socket)
                .is_ok_and(|s| s.set_read_timeout(limit).is_ok() && greeting(s)),
            At::Tcp(port) => TcpStream::connect((Ipv4Addr::LOCALHOST, *port))
                .is_ok_and(|s| s.set_read_timeout(limit).is_ok() && greeting(s)),
        }
    }
}

fn greeting(mut stream: impl Read) -> bool {
    stream.read_exact(&mut [0u8; 8]).is_ok()
}
