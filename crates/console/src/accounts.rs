//! Who may log in, as what, and how a password is checked.
//!
//! Passwords are kept as argon2id digests with the parameters that RFC 9106 gives for hosts with little
//! memory to spare. A name that is not there costs the same time as one that is: how long an answer takes
//! tells nobody who has an account.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use argon2::password_hash::{PasswordHash, PasswordHasher, PasswordVerifier, SaltString};
use argon2::{Algorithm, Argon2, Params, Version};
use hearth_fault::Fault;
use serde::{Deserialize, Serialize};

use crate::files::{self, Stamp};
use crate::secret;
use crate::settings::Home;

/// Shortest password taken.
const PASSWORD_MIN: usize = 10;
/// Longest password looked at: a digest of more is work for nothing.
pub(crate) const PASSWORD_MAX: usize = 1024;
/// Longest name.
const NAME_MAX: usize = 32;
/// Most accounts: a console is for those who look after one host.
const ACCOUNTS_MAX: usize = 256;

/// What somebody may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// See everything, change nothing.
    Viewer,
    /// Change what the console can change.
    Operator,
}

impl Role {
    /// As it is written.
    pub fn word(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
        }
    }
}

/// One account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Account {
    /// What it may do.
    pub role: Role,
    /// Its password's digest.
    hash: String,
}

/// All accounts, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accounts {
    accounts: BTreeMap<String, Account>,
}

/// 19 MiB, two passes, one lane.
fn argon() -> Argon2<'static> {
    Argon2::new(Algorithm::Argon2id, Version::V0x13, Params::DEFAULT)
}

fn digest(password: &str) -> Result<String, Fault> {
    let none = || Fault::bare("the system gives no random numbers");
    let random = secret::fresh().ok_or_else(none)?;
    // A salt is a word; 32 hexadecimal digits carry 16 random bytes.
    let salt = SaltString::from_b64(&random[..32]).map_err(|_| none())?;
    let hash = argon().hash_password(password.as_bytes(), &salt);
    hash.map(|h| h.to_string())
        .map_err(|e| Fault::bare(format!("the password cannot be kept: {e}")))
}

fn matches(password: &str, hash: &str) -> bool {
    PasswordHash::new(hash)
        .is_ok_and(|hash| argon().verify_password(password.as_bytes(), &hash).is_ok())
}

/// The digest of nobody's password.
fn nobodys() -> &'static str {
    static HASH: OnceLock<String> = OnceLock::new();
    HASH.get_or_init(|| digest("nobody has this one").unwrap_or_default())
}

impl Accounts {
    /// Those that are kept.
    pub fn read(home: &Home) -> Result<Accounts, Fault> {
        files::read(&home.accounts_file())
    }

    /// Keeps them.
    pub fn keep(&self, home: &Home) -> Result<(), Fault> {
        home.make()?;
        files::write(&home.accounts_file(), self)
    }

    /// Changes with the accounts.
    pub(crate) fn stamp(home: &Home) -> Stamp {
        files::stamp(&home.accounts_file())
    }

    /// There is none.
    pub fn is_empty(&self) -> bool {
        self.accounts.is_empty()
    }

    /// Names and roles, by name.
    pub fn list(&self) -> impl Iterator<Item = (&str, Role)> {
        self.accounts
            .iter()
            .map(|(name, a)| (name.as_str(), a.role))
    }

    /// The account of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&Account> {
        self.accounts.get(name)
    }

    /// Adds an account.
    pub fn add(&mut self, name: &str, password: &str, role: Role) -> Result<(), Fault> {
        let letter = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(letter) {
            return Err(Fault::new(
                format!("{name:?} is no name for an account"),
                format!("use at most {NAME_MAX} letters, digits, -, _, . and @"),
            ));
        }
        if self.accounts.contains_key(name) {
            return Err(Fault::new(
                format!("there is an account {name} already"),
                "change its password with hearth console account passwd, or remove it first",
            ));
        }
        if self.accounts.len() >= ACCOUNTS_MAX {
            return Err(Fault::new(
                format!("there are {ACCOUNTS_MAX} accounts, and no more"),
                "remove one that nobody uses",
            ));
        }
        let hash = checked(password)?;
        self.accounts
            .insert(name.to_owned(), Account { role, hash });
        Ok(())
    }

    /// Gives an account another password. Its sessions end.
    pub fn set_password(&mut self, name: &str, password: &str) -> Result<(), Fault> {
        let account = self.accounts.get_mut(name).ok_or_else(|| missing(name))?;
        account.hash = checked(password)?;
        Ok(())
    }

    /// Removes an account. Its sessions end.
    pub fn remove(&mut self, name: &str) -> Result<(), Fault> {
        let gone = self.accounts.remove(name);
        gone.map(drop).ok_or_else(|| missing(name))
    }

    /// The account whose password this is. Slow, by intent.
    pub(crate) fn check(&self, name: &str, password: &str) -> Option<&Account> {
        if password.len() > PASSWORD_MAX {
            return None;
        }
        let account = self.accounts.get(name);
        let hash = account.map_or(nobodys(), |a| a.hash.as_str());
        account.filter(|_| matches(password, hash)).or_else(|| {
            if account.is_none() {
                // The same work as for an account that is there.
                let _ = matches(password, hash);
            }
            None
        })
    }
}

fn checked(password: &str) -> Result<String, Fault> {
    if password.chars().count() < PASSWORD_MIN || password.len() > PASSWORD_MAX {
        return Err(Fault::new(
            format!(
                "a password has {PASSWORD_MIN} characters at least, and {PASSWORD_MAX} bytes at most"
            ),
            "three or four words that nobody would put together do",
        ));
    }
    digest(password)
}

fn missing(name: &str) -> Fault {
    Fault::new(
        format!("there is no account {name}"),
        "see hearth console account list",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_checked_and_not_kept() {
        let tmp = tempfile::tempdir().unwrap();
        let home = Home::new(tmp.path());
        let mut accounts = Accounts::default();
        accounts.add("anna", "correct horse", Role::Viewer).unwrap();
        accounts.keep(&home).unwrap();
        let text = std::fs::read_to_string(home.accounts_file()).unwrap();
        assert!(!text.contains("correct horse"), "{text}");
        assert!(text.contains("$argon2id$"), "{text}");
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(home.accounts_file()).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);

        let mut accounts = Accounts::read(&home).unwrap();
        let found = accounts.check("anna", "correct horse").unwrap();
        assert_eq!(found.role, Role::Viewer);
        assert!(accounts.check("anna", "correct house").is_none());
        assert!(accounts.check("anna", "").is_none());
        assert!(accounts.check("otto", "correct horse").is_none());
        assert!(accounts.check("otto", "nobody has this one").is_none());
        accounts.set_password("anna", "battery staple").unwrap();
        assert!(accounts.check("anna", "correct horse").is_none());
        assert!(accounts.check("anna", "battery staple").is_some());
        accounts.remove("anna").unwrap();
        assert!(accounts.is_empty());
    }

    #[test]
    fn names_and_passwords_are_bounded() {
        let mut accounts = Accounts::default();
        for name in ["", "<script>", "a b", "../x", &"x".repeat(33)] {
            assert!(
                accounts.add(name, "long enough", Role::Viewer).is_err(),
                "{name}"
            );
        }
        assert!(accounts.add("a", "short", Role::Viewer).is_err());
        assert!(accounts.add("a", &"x".repeat(1025), Role::Viewer).is_err());
        accounts.add("a", "long enough", Role::Viewer).unwrap();
        assert!(accounts.add("a", "long enough", Role::Viewer).is_err());
    }
}
