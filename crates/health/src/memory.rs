//! The memory controller, by what it says of itself.

use crate::model::Reason;

/// What is known of a controller that was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Controller {
    /// Seconds since it was last heard of, if that is too long.
    pub silent: Option<u64>,
    /// Why nothing helps any more, if so.
    pub helpless: Option<String>,
    /// Why it cannot be understood, if so.
    pub unreadable: Option<String>,
}

/// What is to be said of it. A controller that was stopped in order takes its word with it, and there is nothing to judge.
pub fn judge(controller: &Controller) -> Vec<Reason> {
    let mut reasons = Vec::new();
    if let Some(seconds) = controller.silent {
        reasons.push(Reason::degraded(
            "memory-silent",
            format!("the memory controller has not been heard of for {seconds} s: guests that become short get nothing back"),
            "see `systemctl status hearth-memory`; if it is not to run any more, `hearth memory undo` sets back what it changed",
        ));
        // What it said then is of the past.
        return reasons;
    }
    if let Some(why) = &controller.unreadable {
        reasons.push(Reason::unknown(
            "memory-unreadable",
            format!("what the memory controller says cannot be understood: {why}"),
            "restart hearth-memory and hearth-monitor, so that both are of one version",
        ));
    }
    if let Some(why) = &controller.helpless {
        reasons.push(Reason::degraded(
            "memory-helpless",
            format!("memory is short and nothing helps any more: {why}"),
            "stop a machine, give swap (hearth swap on), or buy RAM; `hearth memory plan` says how much is missing",
        ));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_and_helplessness_are_told_and_nothing_else_is() {
        assert_eq!(judge(&Controller::default()), []);
        let helpless = Controller {
            helpless: Some("no swap".into()),
            ..Controller::default()
        };
        let said = judge(&helpless);
        assert_eq!(said[0].code, "memory-helpless");
        assert!(said[0].what.contains("no swap"));
        let silent = Controller {
            silent: Some(40),
            ..helpless
        };
        let said = judge(&silent);
        assert_eq!(said.len(), 1);
        assert_eq!(said[0].code, "memory-silent");
        let other = Controller {
            unreadable: Some("x".into()),
            ..Controller::default()
        };
        assert_eq!(judge(&other)[0].code, "memory-unreadable");
    }
}
