//! `hearth serve`: sockets, signals, the service manager, from start to end.
//!
//! The order matters. The run directory is claimed before the pool is touched, so that a second
//! daemon is told so at once; the NBD socket appears last, so that whoever waits for it finds
//! every disk; at the end sockets go first, so that no client is promised anything any more.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_events::Event;
use hearth_nbd::NbdExporter;
use hearth_vhost::VhostExporter;

use crate::abort;
use crate::api::authorise::{Door, Listed};
use crate::api::listen::{self, Limits};
use crate::api::server::{Control, router};
use crate::api::types::{DiskHome, PoolExport, Recovery};
use crate::brake::Brake;
use crate::daemon::{Daemon, Options, StopReason, datastores};
use crate::descriptors;
use crate::error::{Error, Kind, Result};
use crate::host::Site;
use crate::monitor::Monitor;
use crate::notify::{self, Notify};
use crate::resident::{self, LockMemory};
use crate::rights::Rights;
use crate::rundir::{
    RunDir, api_socket, default_state_dir, images_dir, make_private, second_socket,
};
use crate::sign::Signs;
use crate::signals;
use crate::upgrade::sockets::Sockets;
use crate::upgrade::{Inherited, Patience, Predecessor, become_next};

/// Longest wait for control requests to be answered at the end.
const API_GRACE: Duration = Duration::from_secs(5);

/// How a pool was found that was closed in order.
const CLEAN: &str = "checkpoint of a clean stop";

/// Encryption of TCP connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// None.
    Off,
    /// The client decides.
    Allowed,
    /// Always.
    Required,
}

/// NBD over TCP.
#[derive(Clone, Debug)]
pub struct Tcp {
    /// Where.
    pub address: SocketAddr,
    /// Other hosts may connect.
    pub allow_remote: bool,
    /// Encryption; `None`: required if there are certificates.
    pub tls: Option<Tls>,
    /// Certificates.
    pub tls_dir: Option<PathBuf>,
}

/// Longest part of a stop without progress: less than `TimeoutStopSec` of the unit.
const STOP_MAX: Duration = Duration::from_secs(80);
/// Exit status after that (`EX_TEMPFAIL`).
const STOP_FAILED: i32 = 75;

/// What to serve, and where.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The pool.
    pub daemon: Options,
    /// Directory of the sockets.
    pub run_dir: PathBuf,
    /// Group that may use the disks; `None` chooses.
    pub socket_group: Option<String>,
    /// Group that may control the daemon.
    pub control_group: Option<String>,
    /// Group of the second service.
    pub monitor_group: Option<String>,
    /// What of the host others than root may name.
    pub listed: Listed,
    /// NBD over TCP as well.
    pub tcp: Option<Tcp>,
    /// Use the flash although Hearth aborted over it several times.
    pub release_brake: bool,
    /// Whether the daemon's own memory is locked.
    pub lock_memory: LockMemory,
}

/// Serves until told to stop. Returns after everything is brought to rest.
pub fn run(options: &ServeOptions) -> Result<()> {
    let begin = Instant::now();
    // Before anything is opened: what was passed on is told from that.
    let inherited = Inherited::take();
    let patience = inherited.as_ref().map(|_| Patience::ask());
    abort::on_panic();
    let notify = Notify::from_env();
    // Before anything is opened: later a lack of descriptors shows in places that know no remedy.
    let budget = descriptors::raise()?;
    tracing::debug!(limit = budget.limit, clients = budget.clients, "open files");
    crate::memory::return_freed();
    // Before threads and children are started, which inherit it.
    let kept = resident::keep(options.lock_memory)?;
    tracing::debug!(
        locked = kept.locked,
        io_flusher = kept.io_flusher,
        oom_score_adj = kept.oom_score_adj,
        "staying in memory"
    );
    signals::survive()?;
    // From here on a signal ends us in order, or, the second one, at once.
    let signalled = watch_signals()?;
    let rights = Rights::find(
        options.socket_group.as_deref(),
        options.control_group.as_deref(),
        options.monitor_group.as_deref(),
    )?;
    let (mut lock, mut sockets, mut left) = (None, BTreeMap::new(), None);
    if let Some(inherited) = inherited {
        (lock, sockets) = (inherited.lock, inherited.sockets);
        left = Some((inherited.predecessor, inherited.connections));
    }
    let sockets = Sockets::inheriting(sockets);
    let mut run_dir = RunDir::claim_from(lock, sockets.clone(), &options.run_dir, &rights)?;
    let tcp = options.tcp.as_ref();
    let tcp = tcp.map(|tcp| tcp_server(tcp, &sockets)).transpose()?;
    let mut daemon_options = options.daemon.clone();
    daemon_options.images = images_dir(run_dir.path());
    daemon_options.handed_over = left.is_some();
    let state_dir = daemon_options.state_dir.clone();
    let state_dir = state_dir.unwrap_or_else(crate::rundir::default_state_dir);
    let events = Arc::new(crate::events::open(&state_dir));
    daemon_options.events = events.clone();
    daemon_options.brake = Some(Brake::beside(run_dir.path(), options.release_brake));
    // The run directory is ours alone now: what opens images there belongs to nobody.
    hearth_origin::sweep(&daemon_options.images);
    let daemon = Daemon::start(&daemon_options).inspect_err(|e| {
        // The user is told by the command's end.
        events.keep(&Event::DaemonStartFailed { why: e.to_string() });
    })?;
    let outcome = serve(
        &daemon,
        &mut run_dir,
        Scene {
            rights: &rights,
            listed: &options.listed,
            tcp,
            over_tcp: options.tcp.as_ref(),
            left,
            patience,
            notify: &notify,
            signalled: &signalled,
            begin,
        },
    );
    if outcome.is_err() {
        // The pool was opened; leave it in order.
        if let Err(e) = daemon.shut_down(StopReason::Signal) {
            tracing::error!("{e}");
        }
    }
    events.close();
    match outcome? {
        StopReason::Signal | StopReason::Export => Ok(()),
        // A failure, as supervisors see it, so that they start it again.
        StopReason::Room => Err(Error::unavailable(
            "stopped because there is room for all of the flash file again",
            "start the daemon again to have the cache back; a supervisor does so by itself",
        )),
        StopReason::Upgrade => {
            // The pool is closed: a signal that comes from here on may just end the process. Handled, it would be
            // forgotten by the next program.
            signals_end_us();
            if signalled.came() {
                // Somebody wants it to end rather than to go on as another program.
                run_dir.sockets().give_up();
                return Ok(());
            }
            let _patience = Patience::ask();
            let changed = daemon.finish_reshaping();
            Err(become_next(daemon.succession(), run_dir, changed))
        }
    }
}

/// What a start has found, and whom it tells.
struct Scene<'a> {
    rights: &'a Rights,
    listed: &'a Listed,
    tcp: Option<hearth_nbd::Tcp>,
    /// What was asked for of that.
    over_tcp: Option<&'a Tcp>,
    /// Of the program before.
    left: Option<(Predecessor, Vec<(OwnedFd, hearth_nbd::carried::State)>)>,
    patience: Option<Patience>,
    notify: &'a Notify,
    signalled: &'a Signals,
    begin: Instant,
}

fn serve(daemon: &Arc<Daemon>, run_dir: &mut RunDir, scene: Scene<'_>) -> Result<StopReason> {
    let Scene {
        rights,
        listed,
        tcp,
        over_tcp,
        left,
        patience,
        notify,
        signalled,
        begin,
    } = scene;
    let dir = run_dir.path().to_owned();
    let (predecessor, mut carried) = left.map_or((None, Vec::new()), |(p, c)| (Some(p), c));
    let before = carried.len() as u64;
    cut_dropped(daemon, &mut carried)?;
    let control = run_dir.listen(&api_socket(&dir), rights.control())?;
    let second = run_dir.listen(&second_socket(&dir), rights.second())?;
    daemon.note_datastores();
    let signs = match run_dir.pid_file() {
        Ok(pid) => Signs::start(pid, daemon),
        Err(e) => {
            tracing::error!("cannot use the pid file: {e}; there will be no signs of life");
            None
        }
    };
    let sockets = run_dir.sockets().clone();
    let host = Site::with(&dir, *rights, daemon.reactors().clone(), sockets.clone());
    let nbd = register(daemon, &host, tcp, carried)?;
    let resumed = nbd.resumed();
    if let Some(mut predecessor) = predecessor {
        predecessor.goes_on_with(resumed, before);
        daemon.tell_succeeded(&predecessor);
    }
    daemon.open_datastores();
    // Whoever gets an answer finds the disks on offer.
    let doors = [(control, Door::Control), (second, Door::Second)];
    let api = Api::start(daemon, doors, listed)?;
    sockets.tidy();
    tracing::info!(
        ms = begin.elapsed().as_millis() as u64,
        "all disks are on offer"
    );
    daemon.tell_started();
    let with_tls = over_tcp.cloned();
    signalled.stop(daemon.clone(), move || reload(&nbd, with_tls.as_ref()));
    let monitor = Monitor::start(daemon);
    drop(patience);
    notify.ready("serving");
    let reason = daemon.housekeeping();
    let replaced = reason == StopReason::Upgrade;
    let _patience = replaced.then(Patience::ask);
    if replaced {
        sockets.stay();
    } else {
        notify.stopping();
        limit_stop();
    }
    daemon.events().tell(Event::DaemonStopping {
        why: reason.words().to_owned(),
    });
    if !replaced {
        daemon.exports().close();
        sockets.close_tcp();
    }
    daemon.close_datastores();
    drop((monitor, signs));
    let outcome = daemon.shut_down(reason);
    // Control clients wait for the end of an export until the socket is gone.
    drop(api);
    daemon.events().tell(match &outcome {
        Ok(()) => Event::DaemonStopped {},
        Err(e) => Event::DaemonStoppedBadly { why: e.to_string() },
    });
    match outcome {
        // What is flushed is safe, and whoever comes next reads the log. What was not may be lost, and clients have
        // to learn of that as after a crash: by losing their connections.
        Err(e) if replaced => {
            tracing::error!("{e}; clients have to connect again");
            daemon.succession().cut();
        }
        other => other?,
    }
    Ok(reason)
}

/// Ends the connections of the program before to disks of which this start has left nothing, as it does of scratch
/// disks when it has to read the log: their clients must not take what they find for what they have written.
fn cut_dropped(
    daemon: &Arc<Daemon>,
    carried: &mut Vec<(OwnedFd, hearth_nbd::carried::State)>,
) -> Result<()> {
    let clean = |found: Recovery| found.how == CLEAN;
    if carried.is_empty() || daemon.pool()?.recovery.is_some_and(clean) {
        return Ok(());
    }
    let disks = daemon.disks()?.into_iter();
    let scratch = disks.filter(|disk| disk.home == DiskHome::Scratch);
    let dropped: BTreeSet<String> = scratch.map(|disk| disk.name).collect();
    carried.retain(|(_, state)| {
        let gone = state.export().filter(|name| dropped.contains(*name));
        if let Some(disk) = gone {
            tracing::error!(
                disk,
                "an NBD client was cut off: nothing of its scratch disk is left"
            );
        }
        gone.is_none()
    });
    Ok(())
}

/// The protocols disks are served over. A new one is a line here, and a crate
/// ([`hearth_volume`] says what has to be in it). The exporter for NBD is returned: it takes up carried connections, and
/// its certificates can be renewed.
fn register(
    daemon: &Daemon,
    host: &Arc<Site>,
    tcp: Option<hearth_nbd::Tcp>,
    carried: Vec<(OwnedFd, hearth_nbd::carried::State)>,
) -> Result<Arc<NbdExporter>> {
    let exports = daemon.exports();
    exports.register(Arc::new(VhostExporter::start(host.clone())?));
    let nbd = Arc::new(NbdExporter::start(&**host, tcp, carried)?);
    exports.register(nbd.clone());
    Ok(nbd)
}

/// Ends the process if the stop makes no progress for [`STOP_MAX`]: flash or an origin hangs, and what guests flushed is as safe
/// as after a crash. A service manager would kill the process some seconds later, without a word.
fn limit_stop() {
    let end = || {
        let mut extensions = notify::extensions();
        loop {
            std::thread::sleep(STOP_MAX);
            let now = notify::extensions();
            if now == extensions {
                break;
            }
            extensions = now;
        }
        tracing::error!(
            "the stop made no progress for {} s, because flash or an origin does not answer; Hearth ends at once, what was flushed is safe",
            STOP_MAX.as_secs()
        );
        crate::log::flush(Duration::from_secs(1));
        std::process::exit(STOP_FAILED);
    };
    // Without a thread the service manager ends it.
    let _ = std::thread::Builder::new()
        .name("hearth-stop".to_owned())
        .spawn(end);
}

/// What SIGHUP does: new connections over TCP get the certificates that are in their directory now.
fn reload(nbd: &NbdExporter, tcp: Option<&Tcp>) {
    match tcp.map(tcp_rules).transpose() {
        Ok(Some(Some((config, _)))) => {
            nbd.renew_tls(config);
            tracing::info!("SIGHUP: the certificates were read again");
        }
        Ok(_) => tracing::info!(
            "SIGHUP: there are no certificates to read again; `hearth upgrade` takes over new settings"
        ),
        Err(e) => tracing::error!("SIGHUP: the certificates stay as they are: {e}"),
    }
}

/// Signals that end the daemon, or have it read something again.
struct Signals {
    /// Set by the first one.
    first: Arc<AtomicBool>,
    iterator: std::sync::Mutex<Option<signal_hook::iterator::Signals>>,
}

fn watch_signals() -> Result<Signals> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let failed = |e: std::io::Error| Error::internal(format!("cannot watch signals: {e}"));
    let first = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal finds the flag unset, and sets it; the second ends us.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, first.clone())
            .map_err(failed)?;
        signal_hook::flag::register(signal, first.clone()).map_err(failed)?;
    }
    let iterator =
        signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(failed)?;
    Ok(Signals {
        first,
        iterator: std::sync::Mutex::new(Some(iterator)),
    })
}

/// Signals that were watched end the process again.
fn signals_end_us() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: plain numbers; nothing of ours runs when one comes.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

impl Signals {
    /// One has come.
    fn came(&self) -> bool {
        self.first.load(Ordering::Relaxed)
    }

    /// From now on the first signal (one that came already, too) stops `daemon`. SIGHUP calls `reload`.
    fn stop(&self, daemon: Arc<Daemon>, reload: impl Fn() + Send + 'static) {
        let Some(mut iterator) = self
            .iterator
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .take()
        else {
            return;
        };
        let wait = move || {
            for signal in iterator.forever() {
                if signal != libc::SIGHUP {
                    return daemon.request_stop(StopReason::Signal);
                }
                reload();
            }
        };
        // The thread ends with the process; it holds nothing that has to be closed.
        if let Err(e) = std::thread::Builder::new()
            .name("hearth-signals".to_owned())
            .spawn(wait)
        {
            tracing::error!("cannot start the signal thread: {e}; the daemon can only be killed");
        }
    }
}

/// Are these options right, as far as can be told without the pool and without listening?
pub fn check(options: &ServeOptions) -> Result<()> {
    Rights::find(
        options.socket_group.as_deref(),
        options.control_group.as_deref(),
        options.monitor_group.as_deref(),
    )?;
    options.tcp.as_ref().map(tcp_rules).transpose().map(drop)
}

fn tcp_server(tcp: &Tcp, sockets: &Sockets) -> Result<hearth_nbd::Tcp> {
    let tls = tcp_rules(tcp)?;
    let encrypted = matches!(tls, Some((_, true)));
    if !tcp.address.ip().is_loopback() && !encrypted {
        tracing::warn!(address = %tcp.address, "other hosts can read and write the disks without TLS");
    }
    let listener = sockets.tcp(tcp.address).map_err(|e| {
        Error::unavailable(
            format!("cannot listen on {}: {e}", tcp.address),
            "choose another address or port",
        )
    })?;
    Ok(hearth_nbd::Tcp { listener, tls })
}

/// What has to be true of a listener on TCP, and its certificates with whether they are required.
fn tcp_rules(tcp: &Tcp) -> Result<Option<(Arc<rustls::ServerConfig>, bool)>> {
    if !tcp.address.ip().is_loopback() && !tcp.allow_remote {
        return Err(Error::refused(
            format!("{} can be reached from other hosts", tcp.address),
            "listen on 127.0.0.1, or add --allow-remote if that is what you want",
        ));
    }
    let tls = tcp.tls.unwrap_or(if tcp.tls_dir.is_some() {
        Tls::Required
    } else {
        Tls::Off
    });
    match (tls, &tcp.tls_dir) {
        (Tls::Off, _) => Ok(None),
        (_, None) => Err(Error::invalid(
            "TLS needs certificates",
            "name their directory with --tls-dir",
        )),
        (tls, Some(dir)) => Ok(Some((certificates(dir)?, tls == Tls::Required))),
    }
}

fn certificates(dir: &Path) -> Result<Arc<rustls::ServerConfig>> {
    let verify_clients = dir.join(hearth_nbd::certs::CA_CERT).exists();
    hearth_nbd::certs::load(dir, verify_clients).map_err(|e| Error::of(Kind::Invalid, e.fault()))
}

/// The control API on a thread of its own; ends, politely, when dropped.
struct Api {
    stop: Vec<tokio::sync::oneshot::Sender<()>>,
    /// Its other end goes when the thread ends.
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Api {
    fn start(
        daemon: &Arc<Daemon>,
        doors: impl IntoIterator<Item = (std::os::unix::net::UnixListener, Door)>,
        listed: &Listed,
    ) -> Result<Api> {
        let failed =
            |e: std::io::Error| Error::internal(format!("cannot start the control API: {e}"));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        let (told, ended) = channel::<()>();
        let control = Arc::new(daemon.clone());
        let routes = router(control, daemon.workers().clone(), listed.clone());
        let mut stop = Vec::new();
        let mut serving = tokio::task::JoinSet::new();
        for (listener, door) in doors {
            listener.set_nonblocking(true).map_err(failed)?;
            let (end, stopped) = tokio::sync::oneshot::channel::<()>();
            stop.push(end);
            let routes = routes.clone();
            let serve = async move {
                let listener = tokio::net::UnixListener::from_std(listener)?;
                listen::serve((listener, door), routes, Limits::default(), stopped).await
            };
            serving.spawn_on(serve, runtime.handle());
        }
        let body = move || {
            let _told = told;
            for end in runtime.block_on(serving.join_all()) {
                if let Err(e) = end {
                    tracing::error!("the control API ended: {e}");
                }
            }
            runtime.shutdown_timeout(API_GRACE);
        };
        let thread = std::thread::Builder::new()
            .name("hearth-api".to_owned())
            .spawn(body)
            .map_err(failed)?;
        Ok(Api {
            stop,
            ended,
            thread: Some(thread),
        })
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.stop.clear();
        let Some(thread) = self.thread.take() else {
            return;
        };
        // A client that keeps its connection open must not keep us.
        let ended = self.ended.recv_timeout(API_GRACE) == Err(RecvTimeoutError::Disconnected);
        if ended && thread.join().is_err() {
            tracing::error!("the control API ended abnormally");
        }
    }
}

/// Writes everything dirty of a pool nobody serves to its origins. `state_dir` is that of its `hearth serve`.
pub fn export_offline(flash: &[PathBuf], state_dir: Option<PathBuf>) -> Result<()> {
    let images = std::env::temp_dir().join(format!("hearth-export-{}", std::process::id()));
    // Its name can be guessed.
    make_private(&images, 0o700)?;
    let state_dir = state_dir.unwrap_or_else(default_state_dir);
    let before = datastores::kept(&state_dir);
    let outcome = export_with(flash, images.clone(), state_dir.clone());
    // Nobody has mounted what was not there before.
    datastores::keep_only(&state_dir, &before);
    // What is still in it is a process that did not end, or nothing worth a word.
    let _ = std::fs::remove_dir(images);
    outcome
}

fn export_with(flash: &[PathBuf], images: PathBuf, state_dir: PathBuf) -> Result<()> {
    abort::on_panic();
    let daemon = Daemon::start(&Options {
        flash: flash.to_owned(),
        images,
        state_dir: Some(state_dir),
        ..Options::default()
    })?;
    match daemon.export_pool(PoolExport { yes: true }) {
        Ok(()) => daemon.shut_down(StopReason::Export),
        Err(e) => {
            daemon.shut_down(StopReason::Signal)?;
            Err(e)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packaged_unit_orders_and_outwaits_the_daemon() {
        let unit = include_str!("../../../packaging/systemd/hearth.service");
        let words = |key: &str| {
            let lines = unit.lines().filter_map(|line| line.strip_prefix(key));
            lines.flat_map(str::split_whitespace).collect::<Vec<_>>()
        };
        // Proxmox starts its guests there.
        assert!(words("Before=").contains(&"pve-guests.service"));
        // An origin may be a volume of ZFS.
        assert!(words("After=").contains(&"zfs-volumes.target"));
        let stop: u64 = words("TimeoutStopSec=")[0].parse().unwrap();
        assert!(Duration::from_secs(stop) > STOP_MAX);
    }
    use crate::api::types::DiskAdd;
    use crate::daemon::testing;
    use crate::workers::Class;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    fn tcp(address: &str) -> Tcp {
        Tcp {
            address: address.parse().unwrap(),
            allow_remote: false,
            tls: None,
            tls_dir: None,
        }
    }

    #[test]
    fn only_loopback_unless_asked() {
        let refused = |a: &str| {
            tcp_server(&tcp(a), &Sockets::default())
                .map(drop)
                .unwrap_err()
        };
        assert_eq!(refused("0.0.0.0:0").kind, Kind::Refused);
        assert_eq!(refused("[::]:0").kind, Kind::Refused);
        assert!(tcp_server(&tcp("127.0.0.1:0"), &Sockets::default()).is_ok());
        assert!(
            tcp_server(
                &Tcp {
                    allow_remote: true,
                    ..tcp("0.0.0.0:0")
                },
                &Sockets::default()
            )
            .is_ok()
        );
    }

    #[test]
    fn tls_needs_certificates() {
        let without = Tcp {
            tls: Some(Tls::Required),
            ..tcp("127.0.0.1:0")
        };
        assert!(
            tcp_server(&without, &Sockets::default())
                .map(drop)
                .unwrap_err()
                .remedy
                .contains("--tls-dir")
        );
        let missing = Tcp {
            tls_dir: Some("/nowhere".into()),
            ..tcp("127.0.0.1:0")
        };
        assert!(
            tcp_server(&missing, &Sockets::default())
                .map(drop)
                .unwrap_err()
                .what
                .contains("/nowhere")
        );
    }

    /// Asks a control API; the answer can be read from what is returned.
    fn ask(socket: &Path, request: &str, body: &str) -> UnixStream {
        let mut stream = UnixStream::connect(socket).unwrap();
        // Far longer than an answer takes.
        let limit = Some(Duration::from_secs(30));
        stream.set_read_timeout(limit).unwrap();
        let head = format!(
            "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + body).as_bytes()).unwrap();
        stream
    }

    fn read(mut stream: UnixStream) -> String {
        let mut text = String::new();
        let whole = stream.read_to_string(&mut text);
        whole.map(|_| text).unwrap_or_default()
    }

    #[test]
    fn adds_that_hang_at_one_server_hold_up_no_other_disk() {
        let (dir, daemon) = testing::with_disk("a");
        let socket = dir.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let doors = [(listener, Door::Control)];
        let api = Api::start(&daemon, doors, &Listed::default()).unwrap();
        let add = |disk: &DiskAdd| {
            let body = serde_json::to_string(disk).unwrap();
            ask(&socket, "POST /v1/disks", &body)
        };
        // It takes connections, and says nothing.
        let server = dir.path().join("silent.sock");
        let silent = UnixListener::bind(&server).unwrap();
        let hung = (0..18).map(|n| {
            let mut disk = DiskAdd {
                name: format!("silent{n}"),
                origin: format!("nbd+unix:///{n}?socket={}", server.display()),
                sole_user: true,
                ..DiskAdd::default()
            };
            disk.settings.origin_timeout = Some(600.0);
            add(&disk)
        });
        let hung: Vec<UnixStream> = hung.collect();
        let most = crate::workers::RUNNING_MAX_SPOT[Class::Asked as usize];
        let connections: Vec<_> = (0..most).map(|_| silent.accept().unwrap()).collect();
        // Those run, the others wait for them; nobody else does.
        let answer = read(add(&testing::disk(dir.path(), "b")));
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        for request in ["POST /v1/disks/b/flush", "GET /v1/disks"] {
            let answer = read(ask(&socket, request, ""));
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        // Who has answered may still be counted for a moment.
        let begin = Instant::now();
        let running = || daemon.workers().census().running[Class::Asked as usize];
        while running() > most && begin.elapsed() < Duration::from_secs(30) {
            std::thread::yield_now();
        }
        assert_eq!(running(), most);
        drop((silent, connections));
        for stream in hung {
            let answer = read(stream);
            assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        }
        drop(api);
        daemon.shut_down(StopReason::Signal).unwrap();
    }

    #[test]
    fn whoever_only_asks_is_answered_while_changes_wait() {
        let (dir, daemon) = testing::with_disk("a");
        let socket = dir.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let doors = [(listener, Door::Control)];
        let api = Api::start(&daemon, doors, &Listed::default()).unwrap();
        let ask = |request: &str| ask(&socket, request, "");
        let (answer, waiting) = testing::beside_a_change(&daemon, "a", || {
            let waiting: Vec<_> = (0..20).map(|_| ask("POST /v1/disks/a/flush")).collect();
            (read(ask("GET /v1/disks")), waiting)
        });
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        for stream in waiting {
            let answer = read(stream);
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        drop(api);
        daemon.shut_down(StopReason::Signal).unwrap();
    }
}
