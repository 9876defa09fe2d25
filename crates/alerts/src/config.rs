//! The section `[alerts]` of `hearth.toml`.
//!
//! Secrets are not in it, but in files that only their owner can read, or in systemd's credentials: a
//! configuration is shown, copied and checked in.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Fewest seconds after which something may count as over.
const OVER_MIN: u64 = 5;

/// Who is told, and how often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AlertsConfig {
    /// What this host is called in messages; its own name unless said.
    pub host: Option<String>,
    /// Tell of what is degraded, or only of what has failed.
    pub least: Least,
    /// Seconds that what happens is gathered before it is told.
    pub gather_seconds: u64,
    /// Hours after which what lasts is told again.
    pub repeat_hours: u64,
    /// Messages an hour at most; what is more waits, and comes in one.
    pub most_per_hour: u64,
    /// Hours that data may wait on flash before that is told.
    pub dirty_hours: u64,
    /// Seconds that the daemon may be away before that is told: as long as a restart or an upgrade takes here.
    pub down_seconds: u64,
    /// Seconds that an origin's server may be away, or something slow or hot, before that is told.
    pub settle_seconds: u64,
    /// Seconds after which what is no longer seen is over. What comes and goes within them is one alert.
    pub over_seconds: u64,
    /// Seconds after which a message that did not arrive is tried again; then longer, at most half an hour.
    pub retry_seconds: u64,
    /// An address that is fetched every minute, for a service that tells when that ends.
    pub heartbeat_url: Option<String>,
    /// By mail.
    pub mail: Option<MailConfig>,
    /// To a program that listens over HTTP.
    pub webhook: Option<WebhookConfig>,
    /// To phones, through a server of ntfy.
    pub ntfy: Option<NtfyConfig>,
}

impl Default for AlertsConfig {
    fn default() -> AlertsConfig {
        AlertsConfig {
            host: None,
            least: Least::Degraded,
            gather_seconds: 20,
            repeat_hours: 24,
            most_per_hour: 12,
            dirty_hours: 4,
            down_seconds: 45,
            settle_seconds: 60,
            over_seconds: 90,
            retry_seconds: 30,
            heartbeat_url: None,
            mail: None,
            webhook: None,
            ntfy: None,
        }
    }
}

/// How bad something must be to be told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Least {
    /// Whatever is wrong.
    #[default]
    Degraded,
    /// What does not work.
    Failed,
}

/// Whether and how a connection to a mail server is encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Security {
    /// It begins plain and must be encrypted before anything is said (port 587).
    #[default]
    Starttls,
    /// It is encrypted from the start (port 465).
    Tls,
    /// Plain (port 25): for a server on this host.
    None,
}

/// By mail: through a server, or the `sendmail` of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MailConfig {
    /// Who gets it.
    pub to: Vec<String>,
    /// Who it comes from; `hearth@HOST` unless said.
    #[serde(default)]
    pub from: Option<String>,
    /// The server; without one, `sendmail` is used.
    #[serde(default)]
    pub server: Option<String>,
    /// Its port, if not the usual one.
    #[serde(default)]
    pub port: Option<u16>,
    /// What this host calls itself to the server (EHLO); [`AlertsConfig::host`] or its own name if that is fully qualified,
    /// otherwise its address.
    #[serde(default)]
    pub helo: Option<String>,
    /// Encryption.
    #[serde(default)]
    pub security: Security,
    /// Who we are to the server.
    #[serde(default)]
    pub user: Option<String>,
    /// The file with the password.
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    /// systemd's credential with the password.
    #[serde(default)]
    pub password_credential: Option<String>,
    /// Certificates of who signed the server's, besides those the system trusts.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// The program used without a server.
    #[serde(default = "sendmail")]
    pub sendmail: PathBuf,
}

/// True for a host name with a domain, as mail servers want it (Postfix: `reject_non_fqdn_helo_hostname`). Names that
/// installers give to hosts without a domain do not count.
pub fn is_qualified(name: &str) -> bool {
    let is_label = |label: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-';
        (1..=63).contains(&label.len())
            && label.chars().all(allowed)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let labels: Vec<&str> = name.split('.').collect();
    let top = labels.last().copied().unwrap_or_default();
    let made_up = ["localdomain", "localhost", "local", "lan", "home"];
    labels.len() >= 2
        && name.len() <= 253
        && labels.iter().all(|label| is_label(label))
        && top.contains(|c: char| c.is_ascii_alphabetic())
        && !made_up.contains(&top.to_ascii_lowercase().as_str())
}

fn sendmail() -> PathBuf {
    PathBuf::from("/usr/sbin/sendmail")
}

/// A program that takes messages as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    /// Where it listens.
    pub url: String,
    /// The file with the key that messages are signed with.
    #[serde(default)]
    pub secret_file: Option<PathBuf>,
    /// systemd's credential with that key.
    #[serde(default)]
    pub secret_credential: Option<String>,
    /// Certificates of who signed its certificate, instead of those commonly trusted.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
}

/// A topic on a server of ntfy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NtfyConfig {
    /// Server and topic: `https://SERVER/TOPIC`.
    pub url: String,
    /// The file with the token that may write to it.
    #[serde(default)]
    pub token_file: Option<PathBuf>,
    /// systemd's credential with that token.
    #[serde(default)]
    pub token_credential: Option<String>,
    /// Certificates of who signed its certificate, instead of those commonly trusted.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
}

impl AlertsConfig {
    /// What makes no sense of it, if anything.
    pub fn check(&self) -> Result<(), String> {
        if let Some(mail) = &self.mail {
            if mail.to.is_empty() {
                return Err("alerts.mail.to names nobody; give at least one address".to_owned());
            }
            let addresses = mail.to.iter().chain(&mail.from);
            for address in addresses {
                if address.parse::<lettre::message::Mailbox>().is_err() {
                    return Err(format!("alerts.mail: “{address}” is no mail address"));
                }
            }
            let password = mail.password_file.is_some() || mail.password_credential.is_some();
            if mail.user.is_some() != password {
                return Err("alerts.mail: user needs password_file or password_credential, and the other way round".to_owned());
            }
            if mail.user.is_some() && mail.security == Security::None {
                return Err("alerts.mail: a password would go over the network in the clear; use security = \"starttls\" or \"tls\"".to_owned());
            }
            if let Some(helo) = mail.helo.as_ref().filter(|name| !is_qualified(name)) {
                return Err(format!(
                    "alerts.mail.helo: “{helo}” is not a fully qualified host name; give one such as kvm1.example.org"
                ));
            }
            if mail.server.is_none() && (mail.user.is_some() || mail.port.is_some()) {
                return Err(
                    "alerts.mail: port, user and password are for a server, and none is given"
                        .to_owned(),
                );
            }
        }
        let urls = [
            ("alerts.webhook.url", self.webhook.as_ref().map(|w| &w.url)),
            ("alerts.ntfy.url", self.ntfy.as_ref().map(|n| &n.url)),
            ("alerts.heartbeat_url", self.heartbeat_url.as_ref()),
        ];
        for (name, url) in urls {
            if url.is_some_and(|u| !u.starts_with("https://") && !u.starts_with("http://")) {
                return Err(format!("{name} must begin with https:// or http://"));
            }
        }
        let token = self
            .ntfy
            .as_ref()
            .is_some_and(|n| n.token_file.is_some() || n.token_credential.is_some());
        if token
            && !self
                .ntfy
                .as_ref()
                .is_some_and(|n| n.url.starts_with("https://"))
        {
            return Err(
                "alerts.ntfy: a token would go over the network in the clear; use https://"
                    .to_owned(),
            );
        }
        for (name, value, least, most) in [
            ("alerts.gather_seconds", self.gather_seconds, 0, 3600),
            ("alerts.repeat_hours", self.repeat_hours, 1, 24 * 31),
            ("alerts.most_per_hour", self.most_per_hour, 1, 1000),
            ("alerts.dirty_hours", self.dirty_hours, 1, 24 * 31),
            ("alerts.down_seconds", self.down_seconds, 0, 3600),
            ("alerts.settle_seconds", self.settle_seconds, 0, 3600),
            // What is over is known from looks some seconds apart; shorter, and each look would end everything.
            ("alerts.over_seconds", self.over_seconds, OVER_MIN, 3600),
            ("alerts.retry_seconds", self.retry_seconds, 1, 1800),
        ] {
            if !(least..=most).contains(&value) {
                return Err(format!("{name} must be between {least} and {most}"));
            }
        }
        Ok(())
    }

    /// Every way a message goes, by a name that stays.
    pub fn ways(&self) -> Vec<String> {
        let mail = self.mail.iter().flat_map(|m| &m.to);
        let mut ways: Vec<String> = mail.map(|to| format!("mail:{to}")).collect();
        ways.extend(self.webhook.iter().map(|_| "webhook".to_owned()));
        ways.extend(self.ntfy.iter().map(|_| "ntfy".to_owned()));
        ways
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<AlertsConfig, String> {
        let config: AlertsConfig = toml::from_str(text).map_err(|e| e.to_string())?;
        config.check().map(|()| config)
    }

    #[test]
    fn what_is_given_and_what_is_not() {
        let config = parse(
            "[mail]\nto = ['a@example.org', 'B <b@example.org>']\n[ntfy]\nurl = 'https://n/t'",
        )
        .unwrap();
        assert_eq!(
            config.ways(),
            ["mail:a@example.org", "mail:B <b@example.org>", "ntfy"]
        );
        assert_eq!(config.repeat_hours, 24);
        assert_eq!(parse("").unwrap(), AlertsConfig::default());
    }

    #[test]
    fn nonsense_and_what_would_tell_a_secret_is_refused() {
        for (text, why) in [
            ("hots = 'x'", "unknown field"),
            ("[mail]\nto = []", "nobody"),
            ("[mail]\nto = ['nobody']", "no mail address"),
            (
                "[mail]\nto = ['a@b.c']\nserver = 's'\nuser = 'u'",
                "password_file",
            ),
            (
                "[mail]\nto = ['a@b.c']\nserver = 's'\nuser = 'u'\npassword_file = '/p'\nsecurity = 'none'",
                "in the clear",
            ),
            ("[mail]\nto = ['a@b.c']\npassword = 'p'", "unknown field"),
            ("[webhook]\nurl = 'ftp://x'", "https://"),
            (
                "[ntfy]\nurl = 'http://n/t'\ntoken_file = '/t'",
                "in the clear",
            ),
            ("repeat_hours = 0", "between 1 and"),
            ("over_seconds = 1", "between 5 and"),
            ("down_seconds = 4000", "between 0 and 3600"),
            ("retry_seconds = 0", "between 1 and"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
