//! Whether and where there is a console, and what its users may reach.
//!
//! It is off until somebody enables it. On loopback a login link is enough, because only who may use the
//! host gets there; on any other address nothing is sent in the clear and nobody comes in without an
//! account. That is asked when it is enabled, and again when it is served, for the file may have been edited.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use hearth_config::reach::check_paths;
use hearth_fault::Fault;
use serde::{Deserialize, Serialize};

use crate::accounts::Accounts;
use crate::files::{self, Stamp};

/// Where the console listens if nothing else is said.
pub const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8477);

/// What the console is told to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// There is a console.
    pub enabled: bool,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Certificate chain and key, as PEM files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsFiles>,
    /// Directories below which users may look for origins, and put recordings.
    #[serde(default)]
    pub paths: Vec<PathBuf>,
    /// Servers, as `HOST` or `HOST:PORT`, whose NBD exports users may add as disks.
    #[serde(default)]
    pub servers: Vec<String>,
}

/// A certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// The chain, the server's own certificate first.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// What the host's own file, `hearth.toml`, says of what users may reach. What stands there counts, whatever was said when
/// the console was enabled: the file is what an administrator keeps, reviews and distributes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reach {
    /// Directories and devices, as in [`Settings::paths`].
    pub allow_path: Option<Vec<PathBuf>>,
    /// Servers, as in [`Settings::servers`].
    pub allow_server: Option<Vec<String>>,
}

impl Reach {
    /// The settings with what the file says.
    pub fn applied(&self, kept: Settings) -> Settings {
        Settings {
            paths: self.allow_path.clone().unwrap_or(kept.paths),
            servers: self.allow_server.clone().unwrap_or(kept.servers),
            ..kept
        }
    }

    /// What of it cannot be.
    pub fn check(&self) -> Result<(), String> {
        check_paths(self.allow_path.iter().flatten())
            .map_err(|fault| format!("console.allow_path: {}; {}", fault.what, fault.remedy))
    }
}

impl Settings {
    /// What users may reach.
    pub(crate) fn reach(&self) -> hearth_config::reach::Reach<'_> {
        hearth_config::reach::Reach {
            paths: &self.paths,
            servers: &self.servers,
            path_remedy: "the console reaches only what hearth console enable --allow-path lists",
            server_remedy: "the console reaches only servers that hearth console enable --allow-server lists",
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            enabled: false,
            listen: LISTEN,
            tls: None,
            paths: Vec::new(),
            servers: Vec::new(),
        }
    }
}

/// The console's folder in the state directory, and what is in it.
#[derive(Clone, Debug)]
pub struct Home {
    dir: PathBuf,
}

impl Home {
    /// Of the daemon that uses this state directory.
    pub fn new(state_dir: &Path) -> Home {
        Home {
            dir: state_dir.join("console"),
        }
    }

    /// Makes the folder, unless it is there.
    pub fn make(&self) -> Result<(), Fault> {
        files::make_dir(&self.dir)
    }

    fn settings_file(&self) -> PathBuf {
        self.dir.join("settings.json")
    }

    pub(crate) fn accounts_file(&self) -> PathBuf {
        self.dir.join("accounts.json")
    }

    pub(crate) fn links_dir(&self) -> PathBuf {
        self.dir.join("links")
    }

    /// The settings, as they are now.
    pub fn settings(&self) -> Result<Settings, Fault> {
        files::read(&self.settings_file())
    }

    /// Changes with the settings.
    pub(crate) fn settings_stamp(&self) -> Stamp {
        files::stamp(&self.settings_file())
    }

    /// Keeps settings that may be served; others are refused.
    pub fn keep(&self, settings: &Settings) -> Result<(), Fault> {
        if settings.enabled {
            settings.check(&Accounts::read(self)?)?;
        }
        self.make()?;
        files::write(&self.settings_file(), settings)
    }
}

impl Settings {
    /// May this be served?
    pub fn check(&self, accounts: &Accounts) -> Result<(), Fault> {
        check_paths(&self.paths)?;
        if self.listen.ip().is_loopback() {
            return Ok(());
        }
        if self.tls.is_none() {
            return Err(Fault::new(
                format!(
                    "{} can be reached from other hosts, and there is no certificate",
                    self.listen
                ),
                "give --tls-cert and --tls-key, or listen on 127.0.0.1 and come in through ssh -L",
            ));
        }
        if accounts.is_empty() {
            return Err(Fault::new(
                format!(
                    "{} can be reached from other hosts, and there is no account",
                    self.listen
                ),
                "add one first: hearth console account add NAME --role operator",
            ));
        }
        Ok(())
    }

    /// What comes before the path in a link to it.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}/", self.listen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::Role;

    #[test]
    fn only_loopback_goes_without_tls_and_accounts() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::new(tmp.path());
        assert!(!home.settings().unwrap().enabled);
        let mut settings = Settings {
            enabled: true,
            ..Settings::default()
        };
        home.keep(&settings).unwrap();
        assert_eq!(home.settings().unwrap(), settings);

        settings.listen = "0.0.0.0:8477".parse().unwrap();
        let refused = home.keep(&settings).unwrap_err();
        assert!(refused.what.contains("certificate"), "{refused}");
        settings.tls = Some(TlsFiles {
            cert: "/c".into(),
            key: "/k".into(),
        });
        let refused = home.keep(&settings).unwrap_err();
        assert!(refused.what.contains("account"), "{refused}");
        let mut accounts = Accounts::default();
        accounts
            .add("anna", "correct horse", Role::Operator)
            .unwrap();
        accounts.keep(&home).unwrap();
        home.keep(&settings).unwrap();
    }

    #[test]
    fn what_the_hosts_file_says_counts() {
        let kept = Settings {
            enabled: true,
            paths: vec!["/srv/a".into()],
            servers: vec!["a".to_owned()],
            ..Settings::default()
        };
        assert_eq!(Reach::default().applied(kept.clone()), kept);
        let reach = Reach {
            allow_path: Some(vec!["/srv/b".into()]),
            // Said, and nobody.
            allow_server: Some(Vec::new()),
        };
        let settings = reach.applied(kept);
        assert!(settings.enabled);
        assert_eq!(settings.paths, [PathBuf::from("/srv/b")]);
        assert_eq!(settings.servers, [""; 0]);
        for path in ["/", "vms"] {
            let reach = Reach {
                allow_path: Some(vec![path.into()]),
                ..Reach::default()
            };
            assert!(reach.check().unwrap_err().contains("allow_path"), "{path}");
        }
    }

    #[test]
    fn nobody_is_given_the_whole_host() {
        let all = Settings {
            paths: vec!["/".into()],
            ..Settings::default()
        };
        assert!(all.check(&Accounts::default()).is_err());
        let relative = Settings {
            paths: vec!["vms".into()],
            ..Settings::default()
        };
        assert!(relative.check(&Accounts::default()).is_err());
    }
}
