//! `hearth serve`: logging, then the daemon.

use std::time::Duration;

use hearth_daemon::api::authorise::Listed;
use hearth_daemon::daemon::Options;
use hearth_daemon::error::Error;
use hearth_daemon::log::Line;
use hearth_daemon::pool::Pool;
use hearth_daemon::resident;
use hearth_daemon::serve::{self, ServeOptions, Tcp};
use tracing_subscriber::EnvFilter;

use crate::Outcome;
use crate::args::{Global, LockMemory, LogFormat, Serve, Tls};

pub fn run(global: &Global, args: Serve) -> Outcome {
    let flash = args.flash.clone();
    if flash.is_empty() {
        return Err(Error::invalid(
            "no flash device is given",
            "name one with --flash PATH, or each of them",
        )
        .into());
    }
    log_to_stderr(args.log.as_deref(), args.log_format)?;
    Ok(serve::run(&options(global, args, flash)?)?)
}

/// What of the options is wrong can be told without serving anything.
pub fn check(global: &Global, args: Serve) -> Result<(), Error> {
    filter(args.log.as_deref())?;
    // None is named where each start is given one.
    let flash = args.flash.clone();
    serve::check(&options(global, args, flash)?)
}

/// Could a daemon with these options serve its pool, which one that runs may be using?
pub fn could(global: &Global, args: Serve) -> Result<(), Error> {
    let flash = args.flash.clone();
    let state_dir = args.state_dir.clone();
    let state_dir = state_dir.unwrap_or_else(hearth_daemon::rundir::default_state_dir);
    check(global, args)?;
    Pool::look_for_service(&flash, &state_dir).map(drop)
}

/// The log's filter, given or default.
fn filter(given: Option<&str>) -> Result<EnvFilter, Error> {
    let env = || std::env::var("HEARTH_LOG").ok();
    let filter = given.map(str::to_owned).or_else(env);
    let filter = filter.as_deref().unwrap_or("info");
    EnvFilter::try_new(filter).map_err(|e| {
        Error::invalid(
            format!("the log filter “{filter}” is not understood: {e}"),
            "use a level such as info",
        )
    })
}

fn options(
    global: &Global,
    args: Serve,
    flash: Vec<std::path::PathBuf>,
) -> Result<ServeOptions, Error> {
    if args.nbd_listen.is_none()
        && (args.tls_dir.is_some() || args.tls.is_some_and(|t| t != Tls::Off))
    {
        return Err(Error::invalid(
            "TLS is for TCP, and no --nbd-listen is given",
            "add --nbd-listen, or leave TLS out",
        ));
    }
    let tcp = args.nbd_listen.map(|address| Tcp {
        address,
        allow_remote: args.allow_remote,
        tls: args.tls.map(|tls| match tls {
            Tls::Off => serve::Tls::Off,
            Tls::Allowed => serve::Tls::Allowed,
            Tls::Required => serve::Tls::Required,
        }),
        tls_dir: args.tls_dir,
    });
    Ok(ServeOptions {
        daemon: Options {
            // Other commands ask where the flash is, from other directories.
            flash: flash
                .iter()
                .map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()))
                .collect(),
            threads: usize::from(args.threads.unwrap_or(0)),
            memory: args.memory.map(|s| s.0),
            destage_rate: args.destage_rate.map_or(0, |s| s.0),
            ram_stage: args.ram_stage.map(|s| s.0),
            flash_timeout: Duration::from_secs(args.flash_timeout),
            endurance: args.endurance,
            no_prefetch: args.no_prefetch,
            accept_damage: args.accept_damage,
            poll: Duration::from_micros(args.poll.unwrap_or(0)),
            nbd_memory: args.nbd_memory.map(|s| s.0),
            // `run` puts it below the run directory.
            images: std::path::PathBuf::new(),
            handed_over: false,
            degraded: None,
            backing_dirs: args
                .backing_dir
                .iter()
                .map(|dir| std::path::absolute(dir).unwrap_or_else(|_| dir.clone()))
                .collect(),
            brake: None,
            exit_when_room: args.exit_when_room.map(Duration::from_secs_f64),
            events: std::sync::Arc::default(),
            state_dir: args
                .state_dir
                .map(|dir| std::path::absolute(&dir).unwrap_or(dir)),
        },
        run_dir: global.dir(),
        socket_group: args.sockets.socket_group,
        control_group: args.sockets.control_group,
        monitor_group: args.sockets.monitor_group,
        listed: Listed {
            paths: args.sockets.allow_path,
            servers: args.sockets.allow_server,
        },
        tcp,
        release_brake: args.release_brake,
        lock_memory: match args.lock_memory {
            LockMemory::Auto => resident::LockMemory::Auto,
            LockMemory::Off => resident::LockMemory::Off,
            LockMemory::Required => resident::LockMemory::Required,
        },
    })
}

/// Logs to standard error from now on: what the filter, given or default, lets through.
pub fn log_to_stderr(filter: Option<&str>, format: LogFormat) -> Result<(), Error> {
    use std::io::IsTerminal;
    let filter = self::filter(filter)?;
    hearth_daemon::log::start()
        .map_err(|e| Error::internal(format!("cannot start the log's thread: {e}")))?;
    let builder = tracing_subscriber::fmt()
        // Of a log that nobody reads any more nobody can be told; the attempt would be a panic.
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_writer(Line::default)
        .with_target(false);
    // A subscriber that is there already stays; there is none in this program.
    let _ = match format {
        LogFormat::Text => builder
            .with_ansi(std::io::stderr().is_terminal())
            .try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    Ok(())
}
