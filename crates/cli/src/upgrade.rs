//! `hearth upgrade`: another program takes the daemon's place, under its clients; and what that program says when
//! it is asked before.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hearth_daemon::api::upgrade::{UpgradeOutcome, UpgradePlan, UpgradeRequest, UpgradeState};
use hearth_daemon::client::Client;
use hearth_daemon::clients;
use hearth_daemon::error::{Error, Kind};
use hearth_daemon::upgrade::probe::Answer;

use crate::args::{CanTakeOver, Command, Global, Upgrade};
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json, serve, usage};

/// How often is asked whether the program has taken over.
const POLL: Duration = Duration::from_millis(20);
/// Longest wait for it: a pool that could not be closed is read anew, with everything in it.
const LIMIT: Duration = Duration::from_secs(600);
/// Longest wait for one answer.
const PATIENCE: Duration = Duration::from_secs(10);

pub fn run(global: &Global, args: &Upgrade) -> Outcome {
    let client = Client::new(&global.dir());
    let mut request = UpgradeRequest {
        program: program(args)?.display().to_string(),
        yes: args.yes,
    };
    let plan: UpgradePlan =
        client
            .post("/v1/upgrade/check", &request)
            .map_err(|e| match e.kind {
                Kind::NotFound => Error::unavailable(
                    "the daemon that runs is too old for another program to take its place",
                    "stop it and start the new one, when guests can stand it",
                ),
                _ => e,
            })?;
    if args.check {
        return if global.json {
            print_json(&plan)
        } else {
            show(&plan);
            Ok(())
        };
    }
    if !global.json {
        show(&plan);
    }
    if !plan.at_risk.is_empty() && !request.yes && !global.json && std::io::stdin().is_terminal() {
        request.yes = asked()?;
    }
    // Without a yes the daemon refuses, and says why.
    let begun: UpgradePlan = client.post("/v1/upgrade", &request)?;
    let outcome = wait(&client.patient_for(PATIENCE), begun.generation)?;
    if let Some(why) = &outcome.failure {
        return Err(Error::unavailable(
            format!(
                "the daemon goes on as version {}, after {} ms: {why}",
                outcome.to, outcome.pause_ms
            ),
            "see that the program is still there and can be run",
        )
        .into());
    }
    if global.json {
        return print_json(&outcome);
    }
    println!(
        "Hearth {} has taken over: clients waited for {} ms",
        plain(&outcome.to),
        outcome.pause_ms
    );
    println!(
        "{} connections went over, {} ended",
        outcome.carried, outcome.ended
    );
    Ok(())
}

/// The program that is to take over.
fn program(args: &Upgrade) -> Result<PathBuf, Error> {
    let named = match &args.program {
        Some(path) => std::path::absolute(path),
        None => std::env::current_exe(),
    };
    named.map_err(|e| {
        Error::invalid(
            format!("cannot tell which program is to take over: {e}"),
            "name it with --program",
        )
    })
}

fn show(plan: &UpgradePlan) {
    eprintln!(
        "from Hearth {} to Hearth {} ({})",
        plain(&plan.from),
        plain(&plan.to),
        plain(&plan.program)
    );
    eprintln!("connections that go over: {}", plan.carried);
    if plan.at_risk.is_empty() {
        return;
    }
    eprintln!("clients that have to connect again, and lose their disks if they do not:");
    let mut table = Table::new(&["disk", "client", "because"]);
    for risk in &plan.at_risk {
        table.row([
            plain(&risk.disk),
            plain(&clients::sentence(std::slice::from_ref(&risk.client))),
            plain(&risk.why),
        ]);
    }
    eprint!("{}", table.render());
}

/// Asks at the terminal whether to go on.
fn asked() -> Result<bool, Failure> {
    eprint!("go on? [y/N] ");
    // Nobody can be told that standard error is gone.
    let _ = std::io::stderr().flush();
    let mut line = String::new();
    std::io::stdin()
        .read_line(&mut line)
        .map_err(|e| Error::unavailable(format!("cannot read the answer: {e}"), "add --yes"))?;
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}

/// Waits until the process has become another program.
fn wait(client: &Client, before: u64) -> Result<UpgradeOutcome, Error> {
    let end = Instant::now() + LIMIT;
    let mut last = None;
    while Instant::now() < end {
        match client.get::<UpgradeState>("/v1/upgrade") {
            Ok(state) if state.generation > before => {
                if let Some(outcome) = state.last {
                    return Ok(outcome);
                }
            }
            Ok(_) => last = None,
            // The socket listens all the time; who was answered by nobody asks again.
            Err(e) if !client.is_up() => return Err(gone(&e)),
            Err(e) => last = Some(e),
        }
        std::thread::sleep(POLL);
    }
    Err(last.unwrap_or_else(|| {
        Error::unavailable(
            format!(
                "the program has not taken over within {} s",
                LIMIT.as_secs()
            ),
            "see the daemon's log",
        )
    }))
}

fn gone(e: &Error) -> Error {
    Error::unavailable(
        format!("the daemon has ended: {}", e.what),
        "see its log; the pool is as after any stop or crash, and the next start takes it up",
    )
}

/// What this program says when it is asked whether it could take over from a daemon with these arguments.
pub fn can_take_over(args: CanTakeOver) -> Outcome {
    print_json(&Answer::own(could_serve(args.args)))
}

fn could_serve(args: Vec<OsString>) -> Result<(), Error> {
    let mut all = vec![OsString::from("hearth")];
    all.extend(args);
    let cli = usage::understand_or_fault(all)
        .map_err(|fault| Error::invalid(fault.what, fault.remedy))?;
    match cli.command {
        Command::Serve(args) => serve::could(&cli.global, args),
        _ => Err(Error::invalid(
            "these are no arguments of a daemon",
            "start it with `hearth serve`",
        )),
    }
}
