//! `hearth monitor` from start to end: directories, parts, signals, the service manager.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use hearth_daemon::client::Client;
use hearth_daemon::error::{Error, Result};
use hearth_daemon::notify::Notify;
use hearth_daemon::rights::Rights;
use hearth_daemon::rundir;

use crate::part::{Context, Kept, Part};
use crate::state::StateDir;
use crate::stop::Stop;
use crate::watch::{Watched, Watching};
use crate::{dirs, serve};

/// Longest a daemon may take for one answer before it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest the parts are waited for at the end. What they have to keep is in files already.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// What it is started with.
pub struct Options {
    /// The daemon's run directory.
    pub run_dir: PathBuf,
    /// The service's own state directory; the default if not given.
    pub state_dir: Option<PathBuf>,
    /// Group that may ask it.
    pub control_group: Option<String>,
    /// What it does besides watching.
    pub parts: Vec<Arc<dyn Part>>,
}

/// Runs the second service until SIGTERM or SIGINT. A second signal ends it at once.
pub fn run(options: Options) -> Result<()> {
    let stop = Stop::default();
    signals(&stop)?;
    let rights = Rights::find(None, options.control_group.as_deref(), None)?;
    let state_dir = options.state_dir.unwrap_or_else(dirs::default_state_dir);
    let context = Context {
        client: Client::of_second(&options.run_dir).patient_for(PATIENCE),
        state: StateDir::claim(&state_dir)?,
        daemon: Watched::default(),
        stop: stop.clone(),
        run_dir: options.run_dir,
    };
    let own_dir = dirs::run_dir(&context.run_dir);
    rundir::make_private_for(&own_dir, rights.run_dir_mode(), "--run-dir")?;
    let socket = rundir::api_socket(&own_dir);
    let listener = rundir::listen(&socket, rights.control())?;

    let watching: Arc<dyn Part> = Arc::new(Watching);
    let parts: Vec<Kept> = (std::iter::once(watching).chain(options.parts))
        .map(Kept::new)
        .collect();
    let routes = serve::routes(&parts, &context);
    let (ended, ends) = channel::<()>();
    for part in &parts {
        let (part, context, ended) = (part.clone(), context.clone(), ended.clone());
        start(format!("mon-{}", part.name()), move || {
            part.keep(&context);
            drop(ended);
        })?;
    }
    let serving = context.clone();
    start("mon-api".to_owned(), move || {
        if let Err(e) = serve::serve(listener, routes, &serving) {
            tracing::error!("{e}");
            // Without it nobody can ask; the service manager starts us anew.
            serving.stop.tell();
        }
        drop(ended);
    })?;

    let notify = Notify::from_env();
    notify.ready("watching");
    tracing::info!(socket = %socket.display(), state = %state_dir.display(), "watching the daemon in {}", context.run_dir.display());
    match notify.watchdog_period() {
        None => stop.wait_for_it(),
        Some(period) => {
            while !stop.wait(period) {
                notify.alive();
            }
        }
    }
    notify.stopping();
    tracing::info!("stopping");
    // A part that hangs in something does not keep the service: the end of the process ends it.
    if ends.recv_timeout(LAST_WAIT) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!("a part did not end in time");
    }
    let _ = std::fs::remove_file(&socket);
    Ok(())
}

fn start(name: String, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name).spawn(work);
    thread
        .map(drop)
        .map_err(|e| Error::internal(format!("cannot start a thread: {e}")))
}

/// The first SIGTERM or SIGINT stops in order, the second at once.
fn signals(stop: &Stop) -> Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let fail = |e: std::io::Error| Error::internal(format!("cannot watch signals: {e}"));
    hearth_daemon::signals::survive()?;
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT]).map_err(fail)?;
    let stop = stop.clone();
    start("hearth-signals".to_owned(), move || {
        for signal in signals.forever() {
            if stop.is_told() {
                std::process::exit(128 + signal);
            }
            stop.tell();
        }
    })
}
