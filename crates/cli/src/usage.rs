//! What is typed wrongly: told in the form that was asked for, and without dangerous guesses.
//!
//! A parser that guesses what was meant by how it is spelt offers `remove` to whoever types `rename`
//! or `rm`. So nothing is offered that takes something away; what people do type is answered with
//! what they are looking for.

use std::error::Error as _;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Error, FromArgMatches};
use hearth_daemon::api::types::ErrorBody;
use hearth_fault::Fault;

use crate::args::{Cli, Command};
use crate::config;

/// Exit status of wrong usage.
const EXIT_USAGE: u8 = 2;
/// Commands that are offered to nobody who did not spell them out.
const DANGEROUS: &[&str] = &[
    "remove",
    "export",
    "accept-loss",
    "create",
    "set",
    "replay",
    "reset",
];
/// What people type, and what they are looking for.
const LOOKED_FOR: &[(&[&str], &str)] = &[
    (
        &["info", "ps"],
        "see `hearth status`, `hearth stats`, `hearth disk list` and `hearth pool show`",
    ),
    (
        &["rename", "mv"],
        "a disk keeps its name for as long as it is there",
    ),
    (
        &["rm", "delete", "del", "destroy", "detach"],
        "see `hearth disk --help` for how a disk is taken out; its origin is left as it is",
    ),
    (&["ls"], "see `hearth disk list`"),
    (&["start", "run", "daemon"], "see `hearth serve --help`"),
    (&["attach", "connect"], "see `hearth attach-help --help`"),
];

/// What is wrong.
enum Wrong {
    /// With what was typed.
    Typed(Error),
    /// With the host's settings, or with what they lack.
    Settings(Fault),
}

/// The command line and what the host's settings add to it, or what is wrong with either, told.
pub fn parse() -> Result<Cli, ExitCode> {
    let args: Vec<OsString> = std::env::args_os().collect();
    understand(args.clone()).map_err(|wrong| {
        let json = args
            .iter()
            .take_while(|arg| *arg != "--")
            .any(|arg| arg == "--json");
        let mut error = match wrong {
            Wrong::Typed(error) => error,
            Wrong::Settings(fault) => {
                crate::report(json, fault);
                return ExitCode::from(EXIT_USAGE);
            }
        };
        if matches!(
            error.kind(),
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
        ) {
            error.exit();
        }
        let hint = mend(&mut error);
        if json {
            let body = body(&error, hint);
            // Infallible: two strings.
            eprintln!("{}", crate::table::json(&body).unwrap_or_default());
        } else {
            let text = error.render().to_string();
            if crate::table::shown(&text) == text {
                // With colours. Nobody can be told that standard error is gone.
                let _ = error.print();
            } else {
                eprint!("{text}");
            }
            if let Some(hint) = hint {
                eprintln!("\n{hint}");
            }
        }
        ExitCode::from(EXIT_USAGE)
    })
}

fn understand(mut args: Vec<OsString>) -> Result<Cli, Wrong> {
    let mut matches = Cli::command()
        .try_get_matches_from(&args)
        .map_err(Wrong::Typed)?;
    let added = match matches.subcommand() {
        Some(("serve", given)) => config::added(given).map_err(Wrong::Settings)?,
        _ => Vec::new(),
    };
    if !added.is_empty() {
        args.extend(added);
        let all = Cli::command().try_get_matches_from(&args);
        matches = all.map_err(Wrong::Typed)?;
    }
    let cli = Cli::from_arg_matches(&matches).map_err(Wrong::Typed)?;
    match &cli.command {
        Command::Serve(serve) if serve.flash.is_empty() => Err(Wrong::Settings(Fault::new(
            "no flash device is given",
            format!(
                "name one with --flash PATH, or as flash = \"PATH\" in {}",
                hearth_config::PATH
            ),
        ))),
        _ => Ok(cli),
    }
}

/// The command line and what the host's settings add to it, or what is wrong with either.
pub fn understand_or_fault(args: Vec<OsString>) -> Result<Cli, Fault> {
    understand(args).map_err(|wrong| match wrong {
        Wrong::Typed(error) => fault(&error),
        Wrong::Settings(fault) => fault,
    })
}

/// What the parser found, of options that nobody typed.
pub fn fault(error: &Error) -> Fault {
    Fault::bare(body(error, None).error)
}

/// Takes dangerous guesses out; what to say instead, if we know.
fn mend(error: &mut Error) -> Option<&'static str> {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return None;
    }
    let typed = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(typed)) => typed.clone(),
        _ => String::new(),
    };
    let hint = LOOKED_FOR
        .iter()
        .find(|(words, _)| words.contains(&typed.as_str()))
        .map(|(_, hint)| *hint);
    let guesses = match error.get(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::String(guess)) => vec![guess.clone()],
        Some(ContextValue::Strings(guesses)) => guesses.clone(),
        _ => Vec::new(),
    };
    if hint.is_some() || guesses.iter().any(|g| DANGEROUS.contains(&g.as_str())) {
        error.remove(ContextKind::SuggestedSubcommand);
        error.remove(ContextKind::Suggested);
    }
    hint
}

/// The parser's text as an error and its remedy.
fn body(error: &Error, hint: Option<&str>) -> ErrorBody {
    let text = error.to_string();
    let line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut what = String::new();
    let mut remedy: Vec<String> = hint.map(str::to_owned).into_iter().collect();
    // What we say ourselves of a value is not in the parser's text alone.
    let ours = error.source().and_then(|e| e.downcast_ref::<Fault>());
    remedy.extend(ours.map(|fault| fault.remedy.clone()));
    for part in text.split("\n\n").map(line) {
        if let Some(first) = part.strip_prefix("error: ") {
            what = first.to_owned();
        } else if let Some(tip) = part.strip_prefix("tip: ") {
            remedy.push(tip.to_owned());
        } else if let Some(usage) = part.strip_prefix("Usage: ") {
            remedy.push(format!("usage: {usage}"));
        }
    }
    if what.is_empty() {
        "no command is given".clone_into(&mut what);
    }
    if remedy.is_empty() {
        remedy.push("see `hearth --help`".to_owned());
    }
    ErrorBody {
        error: what,
        remedy: remedy.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn told(line: &str) -> (String, ErrorBody) {
        let mut error = Cli::try_parse_from(line.split(' ')).unwrap_err();
        let hint = mend(&mut error);
        let text = format!("{error}{}", hint.unwrap_or_default());
        (text, body(&error, hint))
    }

    #[test]
    fn nobody_is_led_to_remove_a_disk() {
        for line in [
            "hearth disk rename a b",
            "hearth disk rm a",
            "hearth disk remov a",
            "hearth info",
            "hearth disk status",
            "hearth pool exprt",
            "hearth rm",
        ] {
            let (text, body) = told(line);
            for word in ["remove", "export", "rm'?", "accept-loss"] {
                assert!(!text.contains(word), "{line}: {text}");
                assert!(!body.remedy.contains(word), "{line}: {body:?}");
            }
        }
        assert!(told("hearth info").0.contains("hearth stats"));
        assert!(told("hearth disk rename a b").0.contains("keeps its name"));
        // What harms nobody may be guessed.
        assert!(told("hearth disk lst").0.contains("'list'"));
    }

    #[test]
    fn usage_errors_have_a_remedy() {
        for line in [
            "hearth",
            "hearth disk",
            "hearth nonsense",
            "hearth disk list --nonsense",
            "hearth disk add vm",
            "hearth serve --flash /a --threads 0",
        ] {
            let (_, body) = told(line);
            assert!(
                !body.error.is_empty() && !body.remedy.is_empty(),
                "{line}: {body:?}"
            );
            assert!(
                !body.error.contains('\n') && !body.error.contains("Usage"),
                "{body:?}"
            );
        }
        let (_, body) = told("hearth disk add vm");
        assert!(body.error.contains("--origin"), "{body:?}");
    }
}
