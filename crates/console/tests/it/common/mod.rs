//! A console that is served on a thread of the test's.

use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_console::{Config, run};
use hearth_rig::wait::until;
use tokio::sync::watch;

/// Serves it until `stopped` says so.
pub fn serve(config: Config, stopped: watch::Receiver<bool>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(run(config, stopped));
    })
}

/// Waits until somebody listens, or nobody does.
pub fn wait(address: SocketAddr, up: bool) {
    let what = format!("the console {}", if up { "comes" } else { "goes" });
    until(&what, Duration::from_secs(30), || {
        (TcpStream::connect(address).is_ok() == up).then_some(())
    })
    .unwrap();
}
