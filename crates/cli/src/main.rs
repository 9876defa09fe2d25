//! The `hearth` command: the daemon, and a client for everything else.
//!
//! Each command prints text for people or, with `--json`, JSON for programs. A failure is one
//! sentence that says what is wrong and what to do about it.

/// All output passes [`table::shown`]: file names and answers of servers are untrusted and must not control the terminal.
/// Control sequences of the program itself are printed with `std::eprint!`.
macro_rules! print {
    ($($text:tt)*) => { std::print!("{}", crate::table::shown(&format!($($text)*))) };
}
macro_rules! println {
    () => { std::println!() };
    ($($text:tt)*) => { std::println!("{}", crate::table::shown(&format!($($text)*))) };
}
macro_rules! eprint {
    ($($text:tt)*) => { std::eprint!("{}", crate::table::shown(&format!($($text)*))) };
}
macro_rules! eprintln {
    () => { std::eprintln!() };
    ($($text:tt)*) => { std::eprintln!("{}", crate::table::shown(&format!($($text)*))) };
}

mod advise;
mod alert;
mod args;
mod attach;
mod bench;
mod config;
mod console;
mod datastore;
mod disk;
mod events;
mod follow;
mod generate;
mod health;
mod histogram;
mod interrupt;
mod memory;
mod metrics;
mod monitor;
mod mount;
mod names;
mod overview;
mod past;
mod pool;
mod record;
mod replay;
mod rescue;
mod section;
mod serve;
mod simulate;
mod stats;
mod status;
mod swap;
mod table;
mod top;
mod trace;
mod upgrade;
mod usage;
mod versions;

use std::process::ExitCode;
use std::time::Duration;

use args::{Cli, Command};
use hearth_daemon::api::types::ErrorBody;
use hearth_daemon::error::Error;
use hearth_fault::Fault;

/// Why a command ended without success.
enum Failure {
    /// Something is wrong.
    Error(Error),
    /// The user called it off; what was called off, for a last message.
    Interrupted(Fault),
    /// What was to be said is said already.
    Said,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(error)
    }
}

type Outcome = Result<(), Failure>;

/// Exit status after Ctrl-C: 128 + SIGINT, as shells do.
const EXIT_INTERRUPTED: u8 = 130;

/// Longest wait for the reader of a daemon's log when it ends.
const LOG_TIME: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let cli = match usage::parse() {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    let Cli { global, command } = cli;
    // A reader that goes away (`hearth disk list | head -1`) ends us quietly; but a daemon must not
    // end because somebody hangs up on it, or on its log.
    let serves = matches!(
        command,
        Command::Serve(_) | Command::Monitor(_) | Command::Memory(args::Memory::Run(_))
    );
    if !serves {
        // SAFETY: setting a signal's default action has no preconditions; no other thread runs yet.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
    let outcome = match command {
        Command::Pool(command) => pool::run(&global, command),
        Command::Swap(command) => swap::run(&global, command),
        Command::Memory(command) => memory::run(&global, command),
        Command::Rescue(args) => rescue::run(&global, &args),
        Command::Serve(args) => serve::run(&global, args),
        Command::Monitor(args) => monitor::run(&global, args),
        Command::Status => overview::run(&global),
        Command::Health => return health::run(&global),
        Command::Names(args) => names::run(&global, &args),
        Command::Alert(command) => alert::run(&global, &command),
        Command::Disk(command) => disk::run(&global, command),
        Command::Datastore(command) => datastore::run(&global, command),
        Command::Stats(args) => stats::run(&global, args),
        Command::Top(args) => top::run(&global, &args),
        Command::Events(args) => events::run(&global, &args),
        Command::Metrics(args) => metrics::run(&global, &args),
        Command::Advise(args) => advise::run(&global, &args),
        Command::Histogram(args) => histogram::run(&global, &args),
        Command::Trace(command) => trace::run(&global, command),
        Command::Simulate(args) => simulate::run(&global, &args),
        Command::Config(command) => config::run(&global, command),
        Command::Generate(args) => generate::run(&args),
        Command::Upgrade(args) => upgrade::run(&global, &args),
        Command::CanTakeOver(args) => upgrade::can_take_over(args),
        Command::Bench(args) => bench::run(&global, &args),
        Command::Console(command) => console::run(&global, command),
        Command::AttachHelp(args) => attach::run(&global, &args),
    };
    hearth_daemon::log::flush(LOG_TIME);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Interrupted(ended)) => {
            report(global.json, ended);
            ExitCode::from(EXIT_INTERRUPTED)
        }
        Err(Failure::Said) => ExitCode::FAILURE,
        Err(Failure::Error(error)) => {
            report(global.json, error.into());
            ExitCode::FAILURE
        }
    }
}

/// Tells why a command ended: programs in two fields, people in one sentence.
fn report(json: bool, fault: Fault) {
    let text = if json {
        let sentence = fault.to_string();
        table::json(&ErrorBody::from(fault)).unwrap_or(sentence)
    } else {
        table::shown(&format!("hearth: {fault}"))
    };
    hearth_daemon::log::end_with(&text);
}

/// Prints `value` as JSON.
fn print_json<T: serde::Serialize>(value: &T) -> Outcome {
    let text = serde_json::to_string_pretty(value)
        .map(|text| table::escaped(&text))
        .map_err(|e| Error::internal(format!("cannot print an answer as JSON: {e}")))?;
    println!("{text}");
    Ok(())
}
