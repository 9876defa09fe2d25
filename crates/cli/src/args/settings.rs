//! The settings of a disk as options of `disk add` and `disk set`, made from the daemon's table of them.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use hearth_daemon::api::types::CacheMode;
use hearth_daemon::error::Error;
use hearth_daemon::origin::ORIGIN_TIMEOUT;
use hearth_daemon::settings::{CLIENTS_MAX, MAX_AGE, SETTINGS, Setting, Takes};
use hearth_fault::Fault;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::trace::span;
use super::{Mode, Size, Switch, parse_size};

/// Seconds to wait for an origin. JSON has no infinity, so the daemon would not see one.
fn parse_timeout(text: &str) -> Result<f64, Fault> {
    match span(text) {
        Some(n) if ORIGIN_TIMEOUT.contains(&n) => Ok(n),
        _ => Err(Fault::new(
            format!("“{text}” is no time that requests can wait"),
            format!(
                "give {} to {} seconds, such as 30s or 2m",
                ORIGIN_TIMEOUT.start(),
                ORIGIN_TIMEOUT.end()
            ),
        )),
    }
}

/// How far behind an origin may be.
fn parse_age(text: &str) -> Result<f64, Fault> {
    match span(text) {
        Some(n) if n == 0.0 || MAX_AGE.contains(&n) => Ok(n),
        _ => Err(Fault::new(
            format!("“{text}” is no time that an origin may be behind"),
            format!(
                "give {} s or more, such as 30s or 5m, or 0 for no limit",
                MAX_AGE.start()
            ),
        )),
    }
}

/// The options that are settings, when a disk is added (`ADD`) or changed; those that were given.
#[derive(Clone, Debug, Default)]
pub struct Settings<const ADD: bool>(Map<String, Value>);

impl<const ADD: bool> Settings<ADD> {
    /// A body of the API with these settings and `others`.
    pub fn body<T: DeserializeOwned>(self, others: Value) -> Result<T, Error> {
        let mut body = self.0;
        if let Value::Object(others) = others {
            body.extend(others);
        }
        serde_json::from_value(Value::Object(body))
            .map_err(|e| Error::internal(format!("cannot ask for these settings: {e}")))
    }

    fn offered() -> impl Iterator<Item = &'static Setting> {
        SETTINGS.iter().filter(|s| ADD || s.takes != Takes::Flag)
    }

    fn option(setting: &Setting) -> Arg {
        let more = if ADD {
            setting.help_add
        } else {
            setting.help_set
        };
        let option = Arg::new(setting.name)
            .long(setting.name.replace('_', "-"))
            .help(format!("{}{more}", setting.help));
        let option = match setting.takes {
            Takes::Mode if ADD => option
                .value_parser(value_parser!(Mode))
                .default_value("write-back"),
            Takes::Mode => option.value_parser(value_parser!(Mode)),
            Takes::OnStart => option.value_parser(["sample", "drop", "keep"]),
            Takes::Size => option.value_parser(parse_size).value_name("SIZE"),
            Takes::Seconds => option.value_parser(parse_timeout).value_name("SECONDS"),
            Takes::Age => option.value_parser(parse_age).value_name("TIME"),
            Takes::Count => option
                .value_parser(value_parser!(u32).range(0..=i64::from(CLIENTS_MAX)))
                .value_name("N"),
            Takes::Switch if !ADD => option
                .value_parser(value_parser!(Switch))
                .num_args(0..=1)
                .default_missing_value("on"),
            Takes::Switch | Takes::Flag => option.action(ArgAction::SetTrue),
        };
        match setting.takes {
            Takes::Mode => option.value_name("MODE"),
            Takes::OnStart => option.value_name("WHAT"),
            Takes::Switch if !ADD => option.value_name(setting.name.to_uppercase()),
            _ => option,
        }
    }

    /// What was given for a setting, as the API takes it.
    fn given(setting: &Setting, matches: &ArgMatches) -> Option<Value> {
        let name = setting.name;
        match setting.takes {
            Takes::Mode => matches
                .get_one::<Mode>(name)
                .map(|mode| json!(CacheMode::from(*mode))),
            Takes::OnStart => matches.get_one::<String>(name).map(|word| json!(word)),
            Takes::Size => matches.get_one::<Size>(name).map(|size| json!(size.0)),
            Takes::Seconds | Takes::Age => matches.get_one::<f64>(name).map(|n| json!(n)),
            Takes::Count => matches.get_one::<u32>(name).map(|n| json!(n)),
            Takes::Switch if !ADD => matches
                .get_one::<Switch>(name)
                .map(|switch| json!(*switch == Switch::On)),
            Takes::Switch | Takes::Flag => matches.get_flag(name).then_some(json!(true)),
        }
    }
}

impl<const ADD: bool> Args for Settings<ADD> {
    fn augment_args(command: Command) -> Command {
        Self::offered().fold(command, |command, setting| {
            let option = Self::option(setting);
            command.arg(if ADD { option } else { option.group("change") })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const ADD: bool> FromArgMatches for Settings<ADD> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut settings = Settings::default();
        settings.update_from_arg_matches(matches)?;
        Ok(settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in Self::offered() {
            if let Some(value) = Self::given(setting, matches) {
                self.0.insert(setting.name.to_owned(), value);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given<const ADD: bool>(words: &[&str]) -> Map<String, Value> {
        let command = Settings::<ADD>::augment_args(Command::new("x"));
        let command = command.group(clap::ArgGroup::new("change").multiple(true));
        let words = std::iter::once("x").chain(words.iter().copied());
        let matches = command.try_get_matches_from(words).unwrap();
        Settings::<ADD>::from_arg_matches(&matches).unwrap().0
    }

    #[test]
    fn every_setting_is_an_option_and_reaches_the_body() {
        for setting in SETTINGS {
            let option = format!("--{}", setting.name.replace('_', "-"));
            let (word, value) = match setting.takes {
                Takes::Mode => ("off", json!("off")),
                Takes::OnStart => ("keep", json!("keep")),
                Takes::Size => ("64K", json!(65536)),
                Takes::Seconds => ("7.5", json!(7.5)),
                Takes::Age => ("2m", json!(120.0)),
                Takes::Count => ("3", json!(3)),
                Takes::Switch => ("off", json!(false)),
                Takes::Flag => ("", json!(true)),
            };
            let on = matches!(setting.takes, Takes::Switch | Takes::Flag);
            let added = match on {
                true => given::<true>(&[&option]),
                false => given::<true>(&[&option, word]),
            };
            let wanted = if on { json!(true) } else { value.clone() };
            assert_eq!(added.get(setting.name), Some(&wanted), "{option}");
            if setting.takes != Takes::Flag {
                let set = given::<false>(&[&option, word]);
                assert_eq!(set.get(setting.name), Some(&value), "{option}");
                assert_eq!(set.len(), 1, "what is not named stays as it is");
            }
        }
        assert_eq!(given::<false>(&[]).len(), 0);
    }
    #[test]
    fn what_is_decided_beside_settings_goes_together() {
        use clap::Parser;
        let parsed = |line: &str| crate::args::Cli::try_parse_from(line.split(' ')).is_ok();
        assert!(parsed(
            "hearth disk add d --origin /d --sole-user --takeover --yes --clients 1"
        ));
        assert!(parsed(
            "hearth disk set d --sole-user --takeover --yes --clients 1"
        ));
        assert!(!parsed("hearth disk set d"));
    }
}
