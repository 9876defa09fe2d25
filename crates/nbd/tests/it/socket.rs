//! The server on a unix socket, run by the reactors, over disks in memory.
#![allow(dead_code)] // tests and the benchmark use different parts

use crate::common::{Disk, server};
use hearth_engine::api::{Effects, ReqError, Request};
use hearth_io::{IoDone, Targets};
use hearth_nbd::NbdFactory;
use hearth_reactor::{BlockEngine, Config, Reactors};
use rustls::ServerConfig;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An engine that completes everything at once.
pub struct Memory(pub Vec<Arc<Disk>>);

impl BlockEngine for Memory {
    fn submit(&self, _now: u64, requests: &mut Vec<Request>, fx: &mut Effects) {
        for request in requests.drain(..) {
            let completion = match self.0.iter().find(|d| d.id == request.disk) {
                Some(disk) => disk.serve(request),
                None => hearth_engine::api::Completion {
                    owner: request.owner,
                    tag: request.tag,
                    result: Err(ReqError::NoDisk),
                    buf: request.buf,
                },
            };
            fx.completions.push(completion);
        }
    }
    fn io_done(&self, _now: u64, _dones: &mut Vec<IoDone>, _fx: &mut Effects) {}
    fn tick(&self, _now: u64, _fx: &mut Effects) -> Option<u64> {
        None
    }
}

pub struct Running {
    pub socket: PathBuf,
    pub reactors: Reactors,
    _dir: tempfile::TempDir,
}

impl Running {
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

/// Listens on `socket` with one data thread.
pub fn start(
    disks: Vec<Arc<Disk>>,
    tls: Option<(bool, Arc<ServerConfig>)>,
    socket: &Path,
) -> Reactors {
    let config = Config {
        threads: 1,
        ..Config::default()
    };
    let reactors =
        Reactors::start(Arc::new(Memory(disks.clone())), Targets::new(), config).unwrap();
    let exports = server(disks);
    let factory = match tls {
        Some((required, config)) => NbdFactory::with_tls(exports, config, required),
        None => NbdFactory::plain(exports),
    };
    reactors.listen(UnixListener::bind(socket).unwrap(), Arc::new(factory));
    reactors
}

/// Serves until the result is dropped.
pub fn serve(disks: Vec<Arc<Disk>>, tls: Option<(bool, Arc<ServerConfig>)>) -> Running {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd.sock");
    let reactors = start(disks, tls, &socket);
    Running {
        socket,
        reactors,
        _dir: dir,
    }
}
