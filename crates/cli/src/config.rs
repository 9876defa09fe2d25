//! What the host's settings say, as options of a command; `hearth config check`.
//!
//! The keys of a section are the command's long options, and the command's own parser judges the values: so an
//! option that is added can be set in the file at once, with the same bounds, and the two never differ. What is
//! typed wins over the file. Some options are for one start only, and a file would keep them for all.

use std::error::Error as _;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command};
use hearth_config::{Config, PATH};
use hearth_fault::Fault;
use serde::Serialize;
use toml::{Spanned, Value};

use crate::args::{ConfigCheck, Global, Serve};
use crate::{Outcome, print_json};

/// Options for one start: each overrides what keeps a daemon from harm.
const ONE_START: &[&str] = &["accept-damage", "release-brake"];
/// The option that names the file itself.
const FILE: &str = "config";

/// What the file adds to a `hearth serve` that was given these options. The host's own file counts if neither a
/// file nor a pool is named: who serves a pool by hand does not want the host's listeners with it.
pub fn added(given: &ArgMatches) -> Result<Vec<OsString>, Fault> {
    let named = given.get_one::<PathBuf>(FILE);
    if named.is_none() && given.contains_id("flash") {
        return Ok(Vec::new());
    }
    let Some(config) = read(named)? else {
        return Ok(Vec::new());
    };
    let typed = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
    let found = Options::find(&config)?.0.into_iter();
    Ok(found
        .filter(|(id, _)| !typed(id))
        .flat_map(|(_, words)| words)
        .collect())
}

/// The file that was named, which has to be there, or the host's.
fn read(named: Option<&PathBuf>) -> Result<Option<Config>, Fault> {
    let path = named.map_or(Path::new(PATH), PathBuf::as_path);
    match Config::read(path)? {
        None if named.is_some() => Err(Fault::new(
            format!("there is no file {}", path.display()),
            "name a file of settings, or leave it out",
        )),
        config => Ok(config),
    }
}

/// `hearth serve` as a command of its own.
fn serve() -> Command {
    Serve::augment_args(Command::new("serve"))
        .disable_help_flag(true)
        .no_binary_name(true)
}

/// A file's settings, each with the identity of its option and as it would be typed.
struct Options(Vec<(String, Vec<OsString>)>);

impl Options {
    fn find(config: &Config) -> Result<Options, Fault> {
        let command = serve();
        let settings = config.sections.serve.iter();
        let options = settings.map(|(key, value)| {
            let arg = option(&command, config, key)?;
            let words = words(arg, config, key, value)?;
            judge(&command, config, key, value, &words)?;
            Ok((arg.get_id().to_string(), words))
        });
        options.collect::<Result<_, Fault>>().map(Options)
    }
}

/// The option a key is the name of.
fn option<'a>(
    command: &'a Command,
    config: &Config,
    key: &Spanned<String>,
) -> Result<&'a Arg, Fault> {
    let name = key.get_ref().as_str();
    if ONE_START.contains(&name) {
        return Err(config.fault(
            &key.span(),
            format!("`{name}` is decided for one start, not for all"),
            format!("take it out, and start once by hand with --{name}"),
        ));
    }
    let long = |arg: &&Arg| arg.get_long() == Some(name) && name != FILE;
    command.get_arguments().find(long).ok_or_else(|| {
        config.fault(
            &key.span(),
            format!("there is no setting `{name}` in [serve]"),
            format!("allowed are {}", keys(command).join(", ")),
        )
    })
}

/// All keys of the section.
fn keys(command: &Command) -> Vec<&str> {
    let names = command.get_arguments().filter_map(Arg::get_long);
    let mut names: Vec<&str> = names
        .filter(|name| *name != FILE && !ONE_START.contains(name))
        .collect();
    names.sort_unstable();
    names
}

/// A setting as it would be typed.
fn words(
    arg: &Arg,
    config: &Config,
    key: &Spanned<String>,
    value: &Spanned<Value>,
) -> Result<Vec<OsString>, Fault> {
    let name = key.get_ref();
    let one = |value: &Value| match value {
        Value::String(text) => Some(format!("--{name}={text}").into()),
        Value::Integer(number) => Some(format!("--{name}={number}").into()),
        Value::Float(number) => Some(format!("--{name}={number}").into()),
        _ => None,
    };
    let (words, allowed) = match (arg.get_action(), value.get_ref()) {
        (ArgAction::SetTrue, Value::Boolean(true)) => (Some(vec![format!("--{name}").into()]), ""),
        (ArgAction::SetTrue, Value::Boolean(false)) => (Some(Vec::new()), ""),
        (ArgAction::SetTrue, _) => (None, "true or false"),
        (ArgAction::Append, Value::Array(many)) => {
            (many.iter().map(one).collect(), "a list of strings")
        }
        (ArgAction::Append, value) => (one(value).map(|word| vec![word]), "a string or a list"),
        (_, value) => (one(value).map(|word| vec![word]), "one string or number"),
    };
    words.ok_or_else(|| {
        let found = value.get_ref().type_str();
        let what = format!("`{name}` cannot be of the kind “{found}”");
        config.fault(&value.span(), what, format!("give {allowed}"))
    })
}

/// Has the command's parser judge one setting.
fn judge(
    command: &Command,
    config: &Config,
    key: &Spanned<String>,
    value: &Spanned<Value>,
    words: &[OsString],
) -> Result<(), Fault> {
    let Err(error) = command.clone().try_get_matches_from(words) else {
        return Ok(());
    };
    // What it needs beside it is asked when all are there.
    if error.kind() == ErrorKind::MissingRequiredArgument {
        return Ok(());
    }
    let name = key.get_ref();
    let (why, remedy) = match error.source() {
        Some(ours) if ours.is::<Fault>() => {
            let fault = ours.downcast_ref::<Fault>().cloned();
            fault.map_or_else(Default::default, |f| (f.what, f.remedy))
        }
        Some(other) => (other.to_string(), String::new()),
        None => {
            let typed = match error.get(ContextKind::InvalidValue) {
                Some(ContextValue::String(typed)) => typed.as_str(),
                _ => "this",
            };
            let valid = match error.get(ContextKind::ValidValue) {
                Some(ContextValue::Strings(valid)) => valid.join(", "),
                _ => String::new(),
            };
            (
                format!("“{typed}” is not allowed"),
                format!("allowed are {valid}"),
            )
        }
    };
    let remedy = match remedy.as_str() {
        "" => format!("`hearth serve --help` says what --{name} takes"),
        _ => remedy,
    };
    Err(config.fault(&value.span(), format!("`{name}`: {why}"), remedy))
}

/// What `hearth config check` found.
#[derive(Serialize)]
struct Checked {
    file: PathBuf,
    settings: usize,
}

pub fn run(global: &Global, command: crate::args::Config) -> Outcome {
    let crate::args::Config::Check(args) = command;
    let checked = check(global, &args)?;
    if global.json {
        return print_json(&checked);
    }
    println!(
        "{}: nothing is wrong with it; {} {} of `hearth serve`",
        checked.file.display(),
        checked.settings,
        if checked.settings == 1 {
            "setting"
        } else {
            "settings"
        },
    );
    Ok(())
}

fn check(global: &Global, args: &ConfigCheck) -> Result<Checked, crate::Failure> {
    let wrong = |fault| hearth_daemon::error::Error::of(hearth_daemon::error::Kind::Invalid, fault);
    let path = args.file.clone().unwrap_or_else(|| PATH.into());
    let config = read(Some(&path)).map_err(wrong)?;
    // `read` has one, for the file was named.
    let config = config.ok_or_else(|| wrong(Fault::bare("there is no file")))?;
    let options = Options::find(&config).map_err(wrong)?.0;
    let settings = options.len();
    let words = options.into_iter().flat_map(|(_, words)| words);
    let within = |fault: Fault| wrong(fault.within(path.display()));
    let matches = serve().try_get_matches_from(words);
    let serve = matches.and_then(|m| <Serve as clap::FromArgMatches>::from_arg_matches(&m));
    let serve = serve.map_err(|e| within(crate::usage::fault(&e)))?;
    crate::serve::check(global, serve).map_err(|e| within(e.into()))?;
    // The second service reads its sections itself.
    crate::monitor::config(Some(&path))?;
    // And so does the memory controller.
    crate::memory::config(Some(&path))?;
    Ok(Checked {
        file: path,
        settings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// The file that the package installs.
    const SHIPPED: &str = include_str!("../../../packaging/hearth.toml");

    fn config(text: &str) -> Result<Config, Fault> {
        Config::parse(Path::new("f"), text.to_owned())
    }

    fn wrong(text: &str) -> String {
        match Options::find(&config(text).unwrap()) {
            Ok(found) => panic!("{text}: {:?}", found.0),
            Err(fault) => fault.to_string(),
        }
    }

    fn typed(text: &str) -> Vec<String> {
        let found = Options::find(&config(text).unwrap()).unwrap().0;
        let words = found.into_iter().flat_map(|(_, words)| words);
        words.map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn settings_are_typed_as_on_the_command_line() {
        let text = "[serve]\nflash = '/f'\nthreads = 2\nno-prefetch = true\nallow-remote = false\n\
            backing-dir = ['/a', '/b']\nexit-when-room = '5m'\ndestage-rate = '20M'\n";
        let mut words = typed(text);
        words.sort_unstable();
        assert_eq!(
            words,
            [
                "--backing-dir=/a",
                "--backing-dir=/b",
                "--destage-rate=20M",
                "--exit-when-room=5m",
                "--flash=/f",
                "--no-prefetch",
                "--threads=2",
            ]
        );
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place_and_what_is_allowed() {
        let at = |text: &str, place: &str, words: &[&str]| {
            let told = wrong(text);
            assert!(told.starts_with(&format!("f:{place}: ")), "{told}");
            for word in words {
                assert!(told.contains(word), "{told}");
            }
        };
        at("[serve]\nthreads = 99\n", "2:11", &["threads", "1..=8"]);
        at(
            "[serve]\n\ntread = 1\n",
            "3:1",
            &["`tread`", "threads, tls"],
        );
        at("[serve]\ntls = 'maybe'\n", "2:7", &["maybe", "required"]);
        at("[serve]\nthreads = true\n", "2:11", &["boolean", "number"]);
        at("[serve]\nno-prefetch = 1\n", "2:15", &["true or false"]);
        at("[serve]\ndestage-rate = '20X'\n", "2:16", &["20X"]);
        at("[serve]\naccept-damage = true\n", "2:1", &["one start"]);
        at("[serve]\nconfig = '/f'\n", "2:1", &["no setting"]);
        at("[serve]\nflash = [1, [2]]\n", "2:9", &["list of strings"]);
    }

    #[test]
    fn what_is_typed_wins() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("hearth.toml");
        std::fs::write(&file, "[serve]\nthreads = 2\nflash = '/file'\npoll = 50\n").unwrap();
        let line = format!(
            "hearth serve --config {} --flash /typed --poll 0",
            file.display()
        );
        let matches = crate::args::Cli::command().get_matches_from(line.split(' '));
        let (_, given) = matches.subcommand().unwrap();
        assert_eq!(added(given).unwrap(), ["--threads=2"]);

        // Who names a pool and no file gets nothing of the host's.
        let matches =
            crate::args::Cli::command().get_matches_from(["hearth", "serve", "--flash=/f"]);
        assert!(added(matches.subcommand().unwrap().1).unwrap().is_empty());
        let line = ["hearth", "serve", "--config", "/nowhere/hearth.toml"];
        let matches = crate::args::Cli::command().get_matches_from(line);
        let missing = added(matches.subcommand().unwrap().1).unwrap_err();
        assert!(missing.what.contains("/nowhere"), "{missing}");
    }

    #[test]
    fn the_shipped_file_names_every_setting_and_each_example_is_right() {
        // All that it sets; the package makes the group.
        assert_eq!(
            typed(SHIPPED),
            ["--control-group=hearth", "--monitor-group=hearth-monitor"]
        );
        // Settings are what a comment without a space begins with.
        let all: String = SHIPPED
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => {
                    rest
                }
                _ => line,
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("hearth.toml");
        std::fs::write(&file, &all).unwrap();
        let crate::monitor::File {
            alerts,
            metrics,
            console,
            drives,
        } = crate::monitor::config(Some(&file)).unwrap();
        assert_ne!(drives, hearth_monitor::collect::DrivesConfig::default());
        assert!(console.allow_path.is_some() && console.allow_server.is_some());
        assert!(metrics.listen.is_some() && metrics.allow_remote);
        assert_eq!(alerts.ways(), ["mail:ops@example.org", "webhook", "ntfy"]);
        // Of examples that are the defaults nothing else is said here.
        let shipped = hearth_alerts::AlertsConfig {
            host: None,
            heartbeat_url: None,
            mail: None,
            webhook: None,
            ntfy: None,
            ..alerts
        };
        assert_eq!(shipped, hearth_alerts::AlertsConfig::default());
        let memory = crate::memory::config(Some(&file)).unwrap();
        assert_eq!(memory.guest.len(), 1);
        let plain = hearth_memory::MemoryConfig {
            guest: Vec::new(),
            cgroup: None,
            ..memory
        };
        assert_eq!(plain, hearth_memory::MemoryConfig::default());
        let config = config(&all).unwrap();
        Options::find(&config).unwrap();
        let command = serve();
        let named: Vec<&str> = config
            .sections
            .serve
            .keys()
            .map(|k| k.get_ref().as_str())
            .collect();
        assert_eq!(named, keys(&command));
    }
}
