/** Numbers and times as people read them. */

/** Milliseconds: "0.8 ms", "312 ms", "4.21 s", "3 min 20 s". null = "–". */
export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

/** A whole number with thin spaces between thousands: "12 345". null = "–". */
export function count(number) {
  if (number === null || number === undefined) return "–";
  return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** A rate with three digits at least: "7.42", "153", "12 345". */
export function rate(number) {
  if (number === null || number === undefined || !Number.isFinite(number)) return "–";
  if (number === 0) return "0";
  return number < 10 ? number.toFixed(2) : number < 100 ? number.toFixed(1) : count(number);
}

/** A share between 0 and 1 as percent. */
export function percent(share) {
  return share === null || share === undefined || !Number.isFinite(share) ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

/** "1 token", "3 tokens". */
export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** The time of day of a moment in milliseconds since 1970. */
export function timeOfDay(ms) {
  return new Date(ms).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}
