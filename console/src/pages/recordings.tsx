import { useState } from "preact/hooks";
import { diskPath, post, type Disk } from "../api";
import { bytes, count, seconds } from "../format";
import { Act, Card, Field, Notice, sentence } from "../parts/ui";
import { useOperator } from "../state";

/** Recording a disk's requests into a file of the host. */
export function Recordings({ disk, again }: { disk: Disk; again: () => void }) {
  const operator = useOperator();
  const { recording } = disk;
  const [file, setFile] = useState("");
  const [minutes, setMinutes] = useState("10");
  return (
    <Card title="Recording">
      {!recording && <p>Its requests are not recorded.</p>}
      {recording && (
        <>
          <p>
            {recording.active ? "Recording into" : "Recorded into"} <code>{recording.file}</code>: {count(recording.records)}{" "}
            requests, {bytes(recording.bytes)}, {seconds(recording.seconds)}.
            {recording.dropped > 0 && ` ${count(recording.dropped)} came faster than the file takes them.`}
          </p>
          {recording.error && (
            <Notice kind="bad">
              <strong>{sentence(recording.error)}</strong> {sentence(recording.remedy ?? "")}
            </Notice>
          )}
        </>
      )}
      {operator && recording?.active && (
        <Act act={() => post(diskPath(disk.name, "/recording/stop"))} done={again}>
          Stop
        </Act>
      )}
      {operator && !recording?.active && (
        <details>
          <summary>Record</summary>
          <Field label="File on the host" hint="It must not be there yet, and lie below a directory the console may reach.">
            <input value={file} placeholder={`/srv/${disk.name}.trace`} onInput={(e) => setFile(e.currentTarget.value)} />
          </Field>
          <Field label="Minutes">
            <input type="number" min={1} max={1440} value={minutes} onInput={(e) => setMinutes(e.currentTarget.value)} />
          </Field>
          <Act
            disabled={!file}
            act={() => post(diskPath(disk.name, "/recording"), { file, seconds: Math.max(1, Number(minutes) || 10) * 60 })}
            done={again}
          >
            Begin
          </Act>
        </details>
      )}
    </Card>
  );
}
